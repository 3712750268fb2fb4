"""One writer per folder: a lock that the system releases when its holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import weakref
from pathlib import Path
from typing import Final

from hocket.errors import CheckpointError

LOCK: Final = "lock"
_held: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


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
