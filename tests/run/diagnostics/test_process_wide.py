"""What a process has only one of is set back, in whatever order."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import pytest

from hocket.run.diagnostics.process_wide import signal_handler, signal_wakeup


def _a(number: int, frame: FrameType | None) -> None: ...


def _b(number: int, frame: FrameType | None) -> None: ...


@pytest.fixture
def before() -> Iterator[object]:
    """What SIGTERM did before the test, and does after it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield handler
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("first", ["made first", "made last"])
def test_handlers_are_set_back(before: object, first: str) -> None:
    """The one that is left goes on; after both, it is as it was."""
    a, b = contextlib.ExitStack(), contextlib.ExitStack()
    a.enter_context(signal_handler(signal.SIGTERM, _a))
    b.enter_context(signal_handler(signal.SIGTERM, _b))
    assert signal.getsignal(signal.SIGTERM) is _b

    (a if first == "made first" else b).close()
    assert signal.getsignal(signal.SIGTERM) is (_b if first == "made first" else _a)
    (b if first == "made first" else a).close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_descriptor_is_never_set_back() -> None:
    """Two pipelines of one process, closed in the order in which they were made."""
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    ends = [socket.socketpair() for _ in range(2)]
    watches = []
    for _, writing in ends:
        writing.setblocking(False)
        watch = contextlib.ExitStack()
        watch.enter_context(signal_wakeup(writing.fileno()))
        watches.append(watch)
    for watch, (reading, writing) in zip(watches, ends, strict=True):
        watch.close()
        writing.close()
        reading.close()
    assert signal.set_wakeup_fd(-1) == before
    signal.set_wakeup_fd(before)
