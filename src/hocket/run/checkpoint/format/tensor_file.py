"""Writes a safetensors file, hashing each tensor on the way.

    8 bytes: length of the JSON │ JSON, padded to 8 │ tensors, one after the other

Nothing is copied: a contiguous tensor on the CPU is written from its own memory.
Hashing and writing let other threads run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.durable import new_file, write_all
from hocket.run.checkpoint.format.manifest import Section, TensorFile, TensorRecord
from hocket.run.checkpoint.format.opened import name_of

SLICE_BYTES: Final = 4 * 2**20  # hashed, and written while the cache still has it


_METADATA: Final = "__metadata__"
_RESERVED: Final = frozenset({"", _METADATA})


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written, whose content is read later.

    Args:
        dtype: safetensors' name of its type.
        shape: the tensor's shape.
        read: returns the tensor when its turn comes.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSource:
        """Return the source of an existing tensor.

        Raises:
            CheckpointError: it is of a kind that safetensors cannot hold.
        """
        if name in _RESERVED:
            raise CheckpointError(
                f"{name!r} names a tensor, but safetensors keeps that name for itself: "
                "rename it"
            )
        if kind := _unknown_kind(tensor):
            raise CheckpointError(
                f"{name} is a {kind} tensor, which safetensors cannot hold"
            )
        dtype = name_of(tensor.dtype, name)
        return cls(dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def num_bytes(self) -> int:
        """The size of its content."""
        return TensorRecord(self.dtype, self.shape, "").num_bytes


def write_tensors(
    path: Path,
    section: Section,
    sources: Mapping[str, TensorSource],
    metadata: Mapping[str, str] | None = None,
    *,
    wants_more: Callable[[], None] = lambda: None,
) -> TensorFile:
    """Write a new file and sync it to disk.

    Args:
        path: the new file.
        section: the kind of its tensors.
        sources: the tensors, by name.
        metadata: further facts for the header.
        wants_more: called now and then; an exception of it ends the writing.

    Raises:
        OSError: the disk is full, or the like.
    """
    header = make_header(sources, {"format": "pt", **(metadata or {})})
    records = {}
    with new_file(path) as handle:
        write_all(handle, header)
        for name, source in sources.items():
            digest = hashlib.sha256()
            content = bytes_of(source.read())
            for begin in range(0, len(content), SLICE_BYTES):
                wants_more()
                piece = content[begin : begin + SLICE_BYTES]
                digest.update(piece)
                write_all(handle, piece)
            records[name] = TensorRecord(source.dtype, source.shape, digest.hexdigest())
    header_sha256 = hashlib.sha256(header).hexdigest()
    return TensorFile(section, path.name, len(header), header_sha256, records)


def make_header(
    sources: Mapping[str, TensorSource], metadata: Mapping[str, str]
) -> bytes:
    """Return the header that comes before the tensors."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    begin = 0
    for name, source in sources.items():
        end = begin + source.num_bytes
        entries[name] = {
            "dtype": source.dtype,
            "shape": list(source.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _unknown_kind(tensor: Tensor) -> str:
    """Return why a tensor is no plain array of numbers; "" if it is one."""
    kinds = {
        "nested": tensor.is_nested,
        "sparse": tensor.layout is not torch.strided,
        "quantized": tensor.is_quantized,
        "meta": tensor.is_meta,
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in memory order, without a copy if possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
