"""Measures when each op of a lane began and ended, in seconds of `perf_counter`.

On a CPU an op is done when its call returns. Work is queued on an accelerator ahead of
time: there the stream records the times, which are read when the step is over.

    host    0F0 0F1 0B0 U    waits for the stream         now_s
    stream    │   0F0   │   0F1   │    0B0    │   U   │    mark
              events before and after each op
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

_P = ParamSpec("_P")
_T = TypeVar("_T")
Seconds: TypeAlias = NDArray[np.float64]

_NUM_MARKS: Final = 8  # events by which a stream's time is compared with the host's


class Stopwatch(Protocol):
    """Records the times of one lane's ops, by their number in the lane."""

    def start(self, i: int) -> None:
        """Record that op `i` begins."""

    def end(self, i: int) -> None:
        """Record that op `i` has ended."""

    def run(
        self, i: int, compute: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Compute op `i`, and record that it begins and has ended."""

    def read(self) -> tuple[Seconds, Seconds]:
        """Return when each op began and ended since the last call; 0 if it did not.

        Call it when the lane has run all ops; it may wait for the device.
        """


def make_stopwatch(num_ops: int, device: torch.device) -> Stopwatch:
    """Make a stopwatch for ops that run on a device."""
    if device.type == "cpu":
        return HostWatch(num_ops)
    return StreamWatch(num_ops, partial(torch.Event, device, enable_timing=True))


class HostWatch:
    """A stopwatch for work that is done when its call returns.

    Args:
        num_ops: the number of the lane's ops.
    """

    def __init__(self, num_ops: int) -> None:
        self._start_s = [0.0] * num_ops
        self._end_s = [0.0] * num_ops

    def start(self, i: int) -> None:
        """See `Stopwatch.start`."""
        self._start_s[i] = perf_counter()

    def end(self, i: int) -> None:
        """See `Stopwatch.end`."""
        self._end_s[i] = perf_counter()

    def run(
        self, i: int, compute: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """See `Stopwatch.run`."""
        self._start_s[i] = perf_counter()
        result = compute(*args, **kwargs)
        self._end_s[i] = perf_counter()
        return result

    def read(self) -> tuple[Seconds, Seconds]:
        """See `Stopwatch.read`."""
        moments = np.array(self._start_s), np.array(self._end_s)
        num_ops = len(self._start_s)
        self._start_s, self._end_s = [0.0] * num_ops, [0.0] * num_ops
        return moments


class TimingEvent(Protocol):
    """An event that a stream passes when all work before it is done (torch.Event)."""

    def record(self) -> None:
        """Record it on the current stream of the current device."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, other: Any, /) -> float:
        """Return the milliseconds to a later event; both have been passed."""


class StreamWatch:
    """A stopwatch for work that is queued on a device's stream.

    Args:
        num_ops: the number of the lane's ops.
        make_event: makes an event that takes the time.
        clock: returns the host's time.
    """

    def __init__(
        self,
        num_ops: int,
        make_event: Callable[[], TimingEvent],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._starts = [make_event() for _ in range(num_ops)]
        self._ends = [make_event() for _ in range(num_ops)]
        self._marks = [make_event() for _ in range(_NUM_MARKS)]
        self._clock = clock
        self._ended: list[int] = []

    def start(self, i: int) -> None:
        """See `Stopwatch.start`."""
        self._starts[i].record()

    def end(self, i: int) -> None:
        """See `Stopwatch.end`."""
        self._ends[i].record()
        self._ended.append(i)

    def run(
        self, i: int, compute: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """See `Stopwatch.run`."""
        self.start(i)
        result = compute(*args, **kwargs)
        self.end(i)
        return result

    def read(self) -> tuple[Seconds, Seconds]:
        """See `Stopwatch.read`.

        Time is taken back from an event of this step, and not on from one of the
        process's beginning: events give milliseconds in 24 bits.
        """
        mark, now_s = self._mark_now()
        start_s, end_s = np.zeros(len(self._starts)), np.zeros(len(self._ends))
        for i in self._ended:
            start_s[i] = now_s - self._starts[i].elapsed_time(mark) / 1e3
            end_s[i] = now_s - self._ends[i].elapsed_time(mark) / 1e3
        self._ended.clear()
        return start_s, end_s

    def _mark_now(self) -> tuple[TimingEvent, float]:
        """Record an event; return it and when the stream passed it.

        After the first one the stream is idle, and passes an event between two readings
        of the clock that are some microseconds apart. The closest two count.
        """
        readings_s = []
        for mark in self._marks:
            before_s = self._clock()
            mark.record()
            mark.synchronize()
            readings_s.append((before_s, self._clock()))
        spans_s = [after_s - before_s for before_s, after_s in readings_s]
        best = spans_s.index(min(spans_s))
        return self._marks[best], sum(readings_s[best]) / 2
