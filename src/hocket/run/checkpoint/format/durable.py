"""Writes files that survive a power failure, or do not exist at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

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
