"""Writes files that survive a power failure, or do not exist at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hocket.errors import CheckpointError

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
