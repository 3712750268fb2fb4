"""Reads weights that torch.distributed.checkpoint wrote, without running their code.

Its metadata is a pickle. Each name in it stands for a plain record that does nothing
(`hocket.restricted_pickle`). Tensors are read with `weights_only`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import CheckpointError
from hocket.restricted_pickle import PickleError, read_pickle

METADATA: Final = ".metadata"
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class _DcpRecord:
    """A record in place of an object of DCP's: its fields, without behaviour."""

    fields: Any

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except (KeyError, TypeError):
            raise AttributeError(name) from None


class _Tensors(_DcpRecord):
    """The locations and forms of tensors in the metadata."""


def _first(*values: Any) -> Any:
    return values[0] if values else None


def _path(*parts: str) -> str:
    return "/".join(parts)


def _table() -> dict[str, Any]:
    metadata = "torch.distributed.checkpoint.metadata."
    records = ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "StorageMeta")
    more = ("TensorProperties", "BytesStorageMetadata")
    table: dict[str, Any] = {
        metadata + name: type(name, (_DcpRecord,), {}) for name in (*records, *more)
    }
    table |= {
        metadata + "TensorStorageMetadata": type("Tensors", (_Tensors,), {}),
        metadata + "_MEM_FORMAT_ENCODING": _first,
        "torch.distributed.checkpoint.filesystem._StorageInfo": type(
            "Info", (_DcpRecord,), {}
        ),
        "torch.Size": tuple,
        "torch.serialization._get_layout": _first,
        "collections.OrderedDict": dict,
        "pathlib.PosixPath": _path,
        "pathlib.WindowsPath": _path,
        "pathlib._local.PosixPath": _path,
        "pathlib._local.WindowsPath": _path,
    }
    dtypes = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return table | {str(dtype): dtype for dtype in dtypes}


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of such a checkpoint, whole, on the CPU.

    Raises:
        CheckpointError: it cannot be read, or would run code.
    """
    try:
        content = (folder / METADATA).read_bytes()
        metadata: Any = read_pickle(content, _table())
        return dict(_tensors(folder, metadata))
    except (CheckpointError, PickleError) as error:
        raise CheckpointError(f"{folder / METADATA}: {error}") from None
    except Exception as error:  # a pickle may fail in any way
        raise CheckpointError(
            f"{folder} is no checkpoint of torch.distributed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _tensors(folder: Path, metadata: Any) -> Iterator[tuple[str, Tensor]]:
    where = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info
        for index, info in metadata.storage_data.items()
    }
    read = _reader(folder)
    for name, form in metadata.state_dict_metadata.items():
        if not isinstance(form, _Tensors):
            continue
        dtype = form.properties.fields[0]
        whole = torch.empty(tuple(form.size), dtype=dtype)
        num_filled = 0
        for piece in form.chunks:
            at = tuple(piece.offsets)
            value = read(where[name, at])
            if tuple(value.shape) != tuple(piece.sizes) or value.dtype != dtype:
                raise CheckpointError(f"{name} is of another form than it should be")
            target = whole
            for dim, (begin, size) in enumerate(zip(at, piece.sizes, strict=True)):
                target = target.narrow(dim, begin, size)
            target.copy_(value)
            num_filled += value.numel()
        if num_filled != whole.numel():
            raise CheckpointError(f"{name} is not there as a whole")
        yield name, whole


def _reader(folder: Path) -> Callable[[Any], Tensor]:
    def read(info: Any) -> Tensor:
        name = str(info.relative_path)
        if not _FILE.fullmatch(name) or (folder / name).is_symlink():
            raise CheckpointError(f"{name!r} is no file of this folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{name} is compressed or the like")
        with (folder / name).open("rb") as file:
            file.seek(int(info.offset))
            content = io.BytesIO(file.read(int(info.length)))
        value = torch.load(content, map_location="cpu", weights_only=True)
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} holds a {type(value).__name__}")
        return value.detach()

    return read
