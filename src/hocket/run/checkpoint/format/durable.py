"""Writes files that survive a power failure, or do not exist at all.

A safetensors file, of which each tensor is hashed on the way:

    8 bytes: length of the JSON │ JSON, padded to 8 │ tensors, one after the other

Nothing is copied: a contiguous tensor on the CPU is written from its own memory.
Hashing and writing let other threads run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import CheckpointError
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


LOCK: Final = "lock"
_held: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Open a file that must not exist yet; it is on disk when the block has ended.

    Raises:
        OSError: it exists, or the disk has no room.
    """
    handle = os.open(path, _CREATE, 0o644)
    try:
        yield handle
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, content: memoryview | bytes) -> None:
    """Write every byte: the system may write fewer at once."""
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


def write_file(path: Path, content: bytes) -> None:
    """Write a new file."""
    with new_file(path) as handle:
        write_all(handle, content)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new one."""
    with renamed_when_complete(path) as temporary:
        write_file(temporary, content)


@contextmanager
def renamed_when_complete(path: Path) -> Iterator[Path]:
    """Write a file or folder under another name; it is renamed when the block ends.

    Yields:
        The path to write to; nothing is left there if the block raises.
    """
    temporary = path.with_name(f".{path.name}.new")
    remove_folder(temporary)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        remove_folder(temporary)
        raise
    sync_folder(path.absolute().parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content, or a file; it may be gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


class FolderLock:
    """The main worker holds it from its first save until its pipeline is closed.

    Args:
        folder: the checkpoints' folder; it must exist.

    Raises:
        CheckpointError: another run holds it; names the process and its host.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._handle: int | None = os.open(self.path, flags, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise CheckpointError(
                f"{folder} belongs to another run that saves there ({_holder(folder)});"
                " give each run a folder of its own, or end that one"
            ) from error
        self.token = secrets.token_hex(8)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "token": self.token}
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(owner).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let other runs write into the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def token_in(folder: Path) -> str:
    """Return what the lock's holder wrote, to check that all workers see one folder."""
    return str(_content(folder).get("token", ""))


def _holder(folder: Path) -> str:
    owner = _content(folder)
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'another host')}"


def _content(folder: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((folder / LOCK).read_bytes()[:1000])
        if isinstance(content, dict):
            return content
    return {}


def _forget_in_child() -> None:
    """Close locks in a forked child (a data loader's)."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
