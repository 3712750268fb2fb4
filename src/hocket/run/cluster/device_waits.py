"""Deadlines of operations that a device waits for while the host goes on.

    host      wait(work) ── goes on ──────────────────────▶ its next call raises
    device    ops before it │ waits for the work ───────────▶ aborted
    thread                  └──────── timeout_s ────────┘

NCCL's own timeout counts from when an operation was posted, which may be a long op or a
pause earlier, and ends the process. Here time counts from when the device has reached
the wait. Then operations are aborted, so that no call that waits for the device hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import torch

from hocket.errors import WaitError

_PAUSE_S: Final = 0.005  # between two looks at what is waited for
_IDLE_S: Final = 2.0  # after which the thread ends; the next wait starts another one

# For NCCL's groups, whose operations have deadlines here.
LONG_TIMEOUT: Final = timedelta(hours=1)


class Posted(Protocol):
    """An operation that was posted, as torch.distributed.Work."""

    def is_completed(self) -> bool:
        """Return whether it has ended."""

    def wait(self) -> object:
        """Let the device's current stream wait for it."""


class Reached(Protocol):
    """An event in a stream of the device, as torch.Event."""

    def query(self) -> bool:
        """Return whether the stream has come to the event."""


@dataclass(slots=True)
class _Wait:
    """A wait of the device, and since when it has waited."""

    work: Posted
    reached: Reached
    what: str
    since_s: float | None = None


@dataclass(eq=False)
class DeviceWaits:
    """Keeps the deadlines of a device's waits in a thread.

    Args:
        timeout_s: how long the device may wait for an operation.
        abort: called in the thread when that is over; ends all that may hang.
        record: records an event in the device's current stream.
    """

    timeout_s: float
    abort: Callable[[], None]
    record: Callable[[], Reached]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._waits: list[_Wait] = []
        self._error: WaitError | None = None
        self._thread: threading.Thread | None = None

    def wait(self, work: Posted, what: str) -> None:
        """Let the current stream wait for an operation; the host goes on.

        Args:
            work: the operation.
            what: what the device waits for, and the ranks, for errors.

        Raises:
            WaitError: an earlier wait took too long.
        """
        self.check()
        reached = self.record()
        work.wait()
        if work.is_completed():
            return
        with self._changed:
            self._waits.append(_Wait(work, reached, what))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="hocket device waits", daemon=True
                )
                self._thread.start()

    def check(self) -> None:
        """Raise the error of a wait that took too long, if there was one.

        Raises:
            WaitError: names what the device waited for.
        """
        if self._error is not None:
            raise self._error

    @property
    def all_in_time(self) -> bool:
        """Whether everything that was waited for has come in time."""
        with self._changed:
            return self._error is None and all(
                wait.work.is_completed() for wait in self._waits
            )

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._waits = [x for x in self._waits if not x.work.is_completed()]
                if not self._changed.wait_for(lambda: bool(self._waits), _IDLE_S):
                    self._thread = None
                    return
                late = self._first_late(time.monotonic())
                if late is not None:
                    self._error = WaitError(
                        f"{late.what}: the device waited {self.timeout_s:.1f} s; the "
                        "other end is gone, stuck, or slower than the timeout allows"
                    )
                    self._waits.clear()
                    self._thread = None
            if late is not None:
                self.abort()
                return
            time.sleep(_PAUSE_S)

    def _first_late(self, now_s: float) -> _Wait | None:
        for wait in self._waits:
            if wait.since_s is None and wait.reached.query():
                wait.since_s = now_s
            if wait.since_s is not None and now_s - wait.since_s > self.timeout_s:
                return wait
        return None


def record_event(device: torch.device) -> torch.Event:
    """Record an event in the current stream of a device."""
    event = torch.Event(device)
    event.record()
    return event
