"""A line on the terminal that says how far a long command has come."""

from __future__ import annotations

import sys
from threading import Timer
from time import monotonic
from types import TracebackType
from typing import Final, Self

_AFTER_S: Final = 1.0  # shorter commands show nothing
_EVERY_S: Final = 0.1


class StatusLine:
    """Writes `planning: 120 of 1,212 candidates` over itself, from one second on.

    Only if standard error is a terminal, so that files and pipes stay clean. The line
    is erased at the end.

    Args:
        what: what the command does.
        noun: what it counts.
        first: what it does before it counts.
    """

    def __init__(self, what: str, noun: str, first: str = "") -> None:
        self._what = what
        self._noun = noun
        self._next_s = monotonic() + _AFTER_S
        self._is_shown = False
        self._begin = Timer(_AFTER_S, self._show, (first,))
        self._begin.daemon = True

    def __call__(self, num_done: int, num_all: int) -> None:
        """Write the line, if it is time."""
        now_s = monotonic()
        if now_s < self._next_s or not sys.stderr.isatty():
            return
        self._next_s = now_s + _EVERY_S
        self._end_first()
        self._show(f"{num_done:,} of {num_all:,} {self._noun}")

    def _show(self, text: str) -> None:
        if text and sys.stderr.isatty():
            self._is_shown = True
            print(f"\r\x1b[K{self._what}: {text}", end="", file=sys.stderr, flush=True)

    def _end_first(self) -> None:
        self._begin.cancel()
        if self._begin.is_alive():
            self._begin.join()

    def __enter__(self) -> Self:
        self._begin.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_first()
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
