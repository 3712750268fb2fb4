"""Calls functions in a thread of its own, one after the other.

caller ── submit(call) ──▶ queue ──▶ thread
   ▲                                   │
   └───── Future: result or error ─────┘
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, TypeVar

R = TypeVar("R")


class BackgroundCalls:
    """Calls functions one after the other, in a thread that no process waits for.

    Those of `concurrent.futures` are joined when the interpreter ends: a read that
    never returns would keep the process.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = SimpleQueue()
        self._drops = False
        self._thread: Thread | None = None  # until something is called
        self._lock = Lock()  # callers may be threads, too

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Return the future result of a call."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        found: Future[R] = Future()
        self._calls.put((call, found))
        return found

    def close(self, within_s: float | None = None) -> None:
        """End the thread.

        Args:
            within_s: wait at most so long for the call under way, and drop those behind
                it; when not given, all calls are made first.
        """
        self._drops = within_s is not None
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None and not self._drops:
            call, found = entry
            try:
                found.set_result(call())
            except BaseException as error:  # the caller raises it
                found.set_exception(error)
