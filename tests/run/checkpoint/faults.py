"""A process that is killed, or whose disk is full, at the nth call to the system."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.run.checkpoint.made import save

CHANGING: Final = ("open", "write", "fsync", "mkdir", "rename", "replace")
REMOVING: Final = ("unlink", "rmdir")


@contextmanager
def struck(
    at: int, names: tuple[str, ...], strike: Callable[[], None]
) -> Iterator[Any]:
    """Strike before the nth call of these functions of `os`; half of a write is done.

    Yields:
        A function that says whether it came to that.
    """
    num_calls = 0

    def struck_function(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == at:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                strike()
            return real(*args, **kwargs)

        return function

    kept = {name: getattr(os, name) for name in names}
    for name, real in kept.items():
        setattr(os, name, struck_function(name, real))
    try:
        yield lambda: num_calls >= at
    finally:
        for name, real in kept.items():
            setattr(os, name, real)


def die() -> None:
    """As if the power went."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_is_full() -> None:
    """What the system says then.

    Raises:
        OSError: always.
    """
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_and_die(folder: str, step: int, keep: int, at: int) -> None:
    """Save, killed at the nth call; ends well if there are fewer."""
    with struck(at, (*CHANGING, *REMOVING), die):
        save(Path(folder), step, keep)
