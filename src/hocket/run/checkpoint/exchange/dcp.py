"""Reads weights that torch.distributed.checkpoint wrote, without running their code.

Its metadata is a pickle. Each name in it stands for a plain record that does nothing
(`hocket.restricted_pickle`). Tensors are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from hocket.errors import CheckpointError
from hocket.model.stages.saved_modules import EXTRA_STATE
from hocket.restricted_pickle import PickleError, read_pickle
from hocket.run.checkpoint.format.tensor_file import unknown_kind

_MAX_DEPTH: Final = 64
_MAX_ENTRIES: Final = 1_000_000

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


def read_dcp(folder: Path) -> dict[str, Any]:
    """Return all tensors, whole, on the CPU, and the extra states of modules.

    Raises:
        CheckpointError: it cannot be read, or would run code.
    """
    try:
        content = (folder / METADATA).read_bytes()
        metadata: Any = read_pickle(content, _table())
        return _values(folder, metadata)
    except (CheckpointError, PickleError) as error:
        raise CheckpointError(f"{folder / METADATA}: {error}") from None
    except Exception as error:  # a pickle may fail in any way
        raise CheckpointError(
            f"{folder} is no checkpoint of torch.distributed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _values(folder: Path, metadata: Any) -> dict[str, Any]:
    where = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info
        for index, info in metadata.storage_data.items()
    }
    found: dict[str, Any] = {}
    for name, form in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {}).get(name, (name,))
        is_extra = str(path[0]).endswith(EXTRA_STATE)
        if isinstance(form, _Tensors) or is_extra:
            try:
                if isinstance(form, _Tensors):
                    value: Any = _whole(folder, name, form, where)
                else:
                    value = _read_values(folder, where[name, ()])
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
            except Exception as error:  # the metadata may hold anything
                raise CheckpointError(
                    f"{name}: {type(error).__name__}: {error}"
                ) from error
            home = found
            for key in path[:-1] if is_extra else ():  # of dicts that DCP has flattened
                home = home.setdefault(key, {})
            home[path[-1] if is_extra else name] = value
    return {k: _lists(x) if k.endswith(EXTRA_STATE) else x for k, x in found.items()}


def _lists(value: Any) -> Any:
    """Return a value whose flattened lists are lists again."""
    if not isinstance(value, dict):
        return value
    values = [_lists(x) for x in value.values()]
    if value and all(isinstance(key, int) for key in value):
        return values
    return dict(zip(value, values, strict=True))


def _whole(
    folder: Path,
    name: str,
    form: _Tensors,
    where: dict[tuple[str, tuple[int, ...]], Any],
) -> Tensor:
    """Put a tensor together from its pieces.

    Raises:
        CheckpointError: a piece is not what the metadata say; two overlap; or they
            leave a hole, whose memory would be uninitialised.
    """
    whole = torch.empty(tuple(form.size), dtype=form.properties.fields[0])
    is_filled = torch.zeros(tuple(form.size), dtype=torch.bool)
    for piece in form.chunks:
        at, sizes = tuple(piece.offsets), tuple(piece.sizes)
        value = _read_piece(folder, where[name, at])
        if tuple(value.shape) != sizes or value.dtype != whole.dtype:
            raise CheckpointError(
                f"the piece at {list(at)} is {value.dtype}{list(value.shape)}, and "
                f"should be {whole.dtype}{list(sizes)}"
            )
        filled = _part(is_filled, at, sizes)
        if bool(filled.any()):
            raise CheckpointError(f"the piece at {list(at)} overlaps another")
        filled.fill_(True)
        _part(whole, at, sizes).copy_(value)
    num_missing = is_filled.numel() - int(is_filled.count_nonzero())
    if num_missing:
        raise CheckpointError(
            f"its pieces leave a hole of {num_missing:,} of its {whole.numel():,} "
            "elements"
        )
    return whole


def _part(tensor: Tensor, at: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return the view of a tensor that a piece fills."""
    for dim, (begin, size) in enumerate(zip(at, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


def _read_piece(folder: Path, info: Any) -> Tensor:
    """Read one tensor from a file of the folder."""
    value, name = _read_values(folder, info), info.relative_path
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{name} holds a {type(value).__name__}")
    if kind := unknown_kind(value):
        raise CheckpointError(f"{name} holds a {kind} tensor")
    return value.detach()


def _read_values(folder: Path, info: Any) -> Any:
    """Read what one place in a file of the folder holds."""
    name = str(info.relative_path)
    if not _FILE.fullmatch(name) or (folder / name).is_symlink():
        raise CheckpointError(f"{name!r} is no file of this folder")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{name} is compressed or the like")
    with (folder / name).open("rb") as file:
        file.seek(int(info.offset))
        content = io.BytesIO(file.read(int(info.length)))
    try:
        return load_values(content)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def load_values(source: Path | IO[bytes]) -> Any:
    """Return what such a file holds, on the CPU.

    Raises:
        CheckpointError: it cannot be read, or names code. The caller names the file.
    """
    try:
        with warnings.catch_warnings():  # about what it then refuses
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            "it holds more than tensors and plain values, so reading it could run "
            f"code; it is not read ({first}). Where you trust it, load it yourself and "
            "save the state dict alone"
        ) from error
    except Exception as error:  # a damaged file may fail in any way
        raise CheckpointError(
            f"it cannot be read: {type(error).__name__}: {error}"
        ) from error


def flattened(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dicts: `{"model": {"a": x}}` has `model.a`.

    The extra state of a module is one entry.

    Raises:
        CheckpointError: the dicts are nested too deeply, as one that contains itself.
    """
    num_entries = 0
    for num_entries, entry in enumerate(_entries(values, "", 0), 1):
        if num_entries > _MAX_ENTRIES:
            raise CheckpointError(f"it has more than {_MAX_ENTRIES:,} entries")
        yield entry


def _entries(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or path.endswith(EXTRA_STATE):
        yield path, value
        return
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{path[:80]}... is nested more than {_MAX_DEPTH} dicts deep, or contains "
            "itself: save the state dict alone"
        )
    for key, x in value.items():
        yield from _entries(x, f"{path}.{key}" if path else str(key), depth + 1)
