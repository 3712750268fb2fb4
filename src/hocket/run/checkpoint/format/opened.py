"""Opens a checkpoint: checks manifest and parts against their hashes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

    def files(self, section: Section) -> Iterator[tuple[WorkerPart, TensorFile]]:
        """Return the tensor files of one section, by rank."""
        for part in self.parts:
            for file in part.files:
                if file.section is section:
                    yield part, file

    def locations(self, section: Section) -> dict[str, TensorLocation]:
        """Return the location of every tensor of a section, by name."""
        return {
            name: TensorLocation(self.path / file.name, begin, record)
            for _, file in self.files(section)
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


def damaged_tensor(location: TensorLocation, name: str) -> DamagedError:
    """Return the error for a tensor whose bytes do not match its hash."""
    last = location.begin + location.record.num_bytes
    return DamagedError(
        f"{location.path} is damaged: the bytes {location.begin:,} to {last:,} "
        f"({name}) are not those that were saved (SHA-256)"
    )


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
