"""A method of Python's or torch's, replaced while jobs share a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Replaced:
    """See above. Several calls of `share` at the same time replace it once.

    Args:
        home: the method's class.
        name: the method's name.
        replacement: given the method, returns what stands for it.
    """

    def __init__(
        self,
        home: type,
        name: str,
        replacement: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._home, self._name, self._replacement = home, name, replacement
        self._lock = threading.Lock()
        self._num_users = 0
        self._method: Any = None

    def __enter__(self) -> None:
        """Replace it, unless it is."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._method = getattr(self._home, self._name)
                setattr(self._home, self._name, self._replacement(self._method))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put it back, if no other call needs it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                setattr(self._home, self._name, self._method)
