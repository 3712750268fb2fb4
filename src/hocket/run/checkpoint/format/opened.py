"""Opens and reads a checkpoint: every byte is checked against its hash."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.format.folder import pointer, step_of
from hocket.run.checkpoint.format.manifest import (
    MANIFEST,
    MANIFEST_HASH,
    Manifest,
    Section,
    TensorFile,
    TensorRecord,
    WorkerPart,
    from_json,
)
from hocket.run.cluster.store.values import unpack

BY_NAME: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,  # ours: safetensors has no name for it
}
_NAMES: Final = {dtype: name for name, dtype in BY_NAME.items()}

K = TypeVar("K", bound=Hashable)

SLICE_BYTES: Final = 4 * 2**20  # read and hashed at once: fits a cache
_MAX_JSON_BYTES: Final = 512 * 2**20
# Refuses links out of the folder, and pipes, on which opening would wait.
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The place of a tensor's bytes.

    Args:
        path: the file.
        begin: the first byte.
        record: the tensor's record.
    """

    path: Path
    begin: int
    record: TensorRecord


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint whose records are read, but not its tensors.

    Args:
        path: the checkpoint's folder.
        manifest: checked against its hash.
        parts: the parts by rank, checked against their hashes.
    """

    path: Path
    manifest: Manifest
    parts: tuple[WorkerPart, ...]

    @property
    def extra(self) -> dict[str, Any]:
        """The extra states of modules, by name."""
        return {k: unpack(x) for part in self.parts for k, x in part.extra.items()}

    def files(self, section: Section) -> Iterator[tuple[WorkerPart, TensorFile]]:
        """Return the tensor files of one section, by rank."""
        for part in self.parts:
            for file in part.files:
                if file.section is section:
                    yield part, file

    def locations(self, section: Section) -> dict[str, TensorLocation]:
        """Return the location of every tensor of a section, by name."""
        found: dict[str, TensorLocation] = {}
        for _, file in self.files(section):
            found |= self.locations_in(file)
        return found

    def locations_in(self, file: TensorFile) -> dict[str, TensorLocation]:
        """Return the location of every tensor of a file, by name."""
        return {
            name: TensorLocation(self.path / file.name, begin, record)
            for name, record, begin in file.locations()
        }


def open_checkpoint(path: Path) -> OpenedCheckpoint:
    """Read manifest and parts, and check that all files have their full length.

    Raises:
        DamagedError: something is missing, too short, or not what was written.
        CheckpointError: the path is no checkpoint.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder, so no checkpoint")
    opened = read_checkpoint(path)
    step = opened.manifest.run.step
    if step != step_of(path):
        raise DamagedError(
            f"{path / MANIFEST} is of step {step}: it belongs to another checkpoint, "
            "or the folder was renamed"
        )
    return opened


def read_checkpoint(path: Path) -> OpenedCheckpoint:
    """Open a checkpoint, whatever the folder's name.

    Raises:
        DamagedError: something is missing, too short, or not what was written.
    """
    content = _checked(path / MANIFEST, _expected(path), MANIFEST_HASH)
    manifest = from_json(Manifest, content, path / MANIFEST)
    parts = tuple(
        from_json(
            WorkerPart, _checked(path / x.name, x.sha256, MANIFEST), path / x.name
        )
        for x in manifest.parts
    )
    for part in parts:
        for file in part.files:
            _check_file(path / file.name, file, path / part.name)
    return OpenedCheckpoint(path, manifest, parts)


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """Open a regular file of a checkpoint for reading.

    Raises:
        DamagedError: it is missing, or is no regular file.
    """
    try:
        handle = os.open(path, _OPEN)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DamagedError(f"{path} is no regular file")
        yield handle
    finally:
        os.close(handle)


def hash_range(
    handle: int, begin: int, num_bytes: int, path: Path, into: memoryview | None = None
) -> str:
    """Return the SHA-256 of some bytes of a file, and optionally keep the bytes.

    Args:
        handle: the open file.
        begin: the first byte.
        num_bytes: the number of bytes.
        path: the file's path, for errors.
        into: a buffer of that many bytes to read into; without it, nothing is kept.

    Raises:
        DamagedError: the file ends earlier, or cannot be read.
    """
    digest = hashlib.sha256()
    kept = memoryview(bytearray(min(SLICE_BYTES, num_bytes))) if into is None else into
    done = 0
    while done < num_bytes:
        size = min(SLICE_BYTES, num_bytes - done)
        target = kept[:size] if into is None else kept[done : done + size]
        try:
            got = os.preadv(handle, [target], begin + done)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
        if got == 0:
            raise DamagedError(f"{path} ends after {begin + done:,} bytes")
        digest.update(target[:got])
        done += got
    return digest.hexdigest()


def opened_files(
    locations: Mapping[K, TensorLocation],
) -> Iterator[tuple[int, K, TensorLocation]]:
    """Yield tensors in the order of their bytes, each with its open file and key."""
    by_file: dict[Path, list[tuple[K, TensorLocation]]] = {}
    for key, location in locations.items():
        by_file.setdefault(location.path, []).append((key, location))
    for path, wanted in by_file.items():
        with open_file(path) as handle:
            for key, location in sorted(wanted, key=lambda pair: pair[1].begin):
                yield handle, key, location


def check_tensors(locations: Mapping[str, TensorLocation]) -> None:
    """Read tensors only to check that they are what was saved.

    Raises:
        DamagedError: a byte differs; names the file.
    """
    for handle, name, location in opened_files(locations):
        check_tensor(handle, location, name)


def check_tensor(
    handle: int, location: TensorLocation, name: str, into: memoryview | None = None
) -> None:
    """Read a tensor and compare it with its hash.

    Args:
        handle: the open file.
        location: the tensor's location.
        name: the tensor's name, for errors.
        into: a buffer to keep the bytes in; without it, nothing is kept.

    Raises:
        DamagedError: a byte differs; names the file.
    """
    begin, num_bytes = location.begin, location.record.num_bytes
    found = hash_range(handle, begin, num_bytes, location.path, into)
    if found != location.record.sha256:
        raise DamagedError(
            f"{location.path} is damaged: the bytes {begin:,} to "
            f"{begin + num_bytes:,} ({name}) are not those that were saved (SHA-256)"
        )


def read_tensors(locations: Mapping[K, TensorLocation]) -> dict[K, Tensor]:
    """Return tensors by any key, in new memory on the CPU.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    found: dict[K, Tensor] = {}
    for handle, key, location in opened_files(locations):
        record = location.record
        content = torch.empty(record.num_bytes, dtype=torch.uint8)
        check_tensor(handle, location, str(key), content.numpy().data)
        found[key] = content.view(BY_NAME[record.dtype]).reshape(record.shape)
    return found


def read_tensor(location: TensorLocation, name: str) -> Tensor:
    """Return one tensor.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    return read_tensors({name: location})[name]


def verify(path: str | Path) -> OpenedCheckpoint:
    """Check a whole checkpoint.

    Args:
        path: one checkpoint (`.../step-00000120`).

    Raises:
        DamagedError: a byte differs, or something is missing; names the file.
        CheckpointError: it is no checkpoint.
    """
    path = Path(path)
    check_pointer(path)
    opened = open_checkpoint(path)
    for part in opened.parts:
        for file in part.files:
            check_tensors(opened.locations_in(file))
    return opened


def is_whole(path: Path) -> bool:
    """Return whether manifest, parts and the lengths of all files are right.

    This check is quick: tensors are not read.
    """
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _expected(path: Path) -> str:
    """Return the manifest's expected hash, from both files that hold it."""
    hash_path = path / MANIFEST_HASH
    with open_file(hash_path) as handle:
        content = os.read(handle, 200)
    stated, _, rest = content.decode(errors="replace").partition(" ")
    if rest != f" {MANIFEST}\n":
        raise DamagedError(f"{hash_path} is damaged: not `<hash>  {MANIFEST}`")
    return stated


def check_pointer(path: Path) -> None:
    """Check that `latest`, if it names this checkpoint, has its hash.

    Raises:
        DamagedError: the hashes differ.
    """
    found = pointer(path.parent)
    if found is not None and found.name == path.name:
        stated = _expected(path)
        if stated != found.sha256:
            raise DamagedError(
                f"{path.parent / 'latest'} names {path.name} with the hash "
                f"{found.sha256[:12]}..., but {path / MANIFEST_HASH} says "
                f"{stated[:12]}...: one of them is damaged"
            )


def _checked(path: Path, sha256: str, stated_in: str) -> bytes:
    with open_file(path) as handle:
        size = os.fstat(handle).st_size
        if size > _MAX_JSON_BYTES:
            raise DamagedError(f"{path} has {size:,} bytes: too many for what it is")
        content = bytearray(size)
        found = hash_range(handle, 0, size, path, memoryview(content))
    if found != sha256:
        raise DamagedError(
            f"{path} is damaged: its SHA-256 is {found[:12]}..., but {stated_in} says "
            f"{sha256[:12]}..."
        )
    return bytes(content)


def _check_file(path: Path, file: TensorFile, stated_in: Path) -> None:
    with open_file(path) as handle:
        size = os.fstat(handle).st_size
        if size != file.num_bytes:
            raise DamagedError(
                f"{path} has {size:,} bytes, where {stated_in.name} says "
                f"{file.num_bytes:,}"
            )
        if hash_range(handle, 0, file.header_bytes, path) != file.header_sha256:
            raise DamagedError(
                f"{path} is damaged: its first {file.header_bytes:,} bytes are not "
                "those that were saved (SHA-256)"
            )


def name_of(dtype: torch.dtype, tensor_name: str) -> str:
    """Return safetensors' name of a type.

    Raises:
        CheckpointError: it has no name for this type.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{tensor_name} is of type {dtype}, which safetensors cannot hold"
        )
    return _NAMES[dtype]
