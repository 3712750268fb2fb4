"""Measures when each op of a lane began and ended, in seconds of `perf_counter`.

On a CPU an op is done when its call returns. Work is queued on an accelerator ahead of
time: there the stream records the times, which the host reads later.

    host    0F0 0F1 0B0 U    goes on: the next step       reads, when the mark is passed
    stream    │   0F0   │   0F1   │    0B0    │   U   │ mark
              events before and after each op
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.run.device.late import Late

_P = ParamSpec("_P")
_T = TypeVar("_T")
Seconds: TypeAlias = NDArray[np.float64]
Times: TypeAlias = tuple[Seconds, Seconds]  # when each op began, and when it ended

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

    def read(self) -> Late[Times]:
        """Return when each op began and ended since the last call; 0 if it did not.

        Call it when the lane was given all ops. The first call waits for a device to
        run them, and each later one until it has run those of the call before.
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

    def read(self) -> Late[Times]:
        """See `Stopwatch.read`."""
        moments = np.array(self._start_s), np.array(self._end_s)
        num_ops = len(self._start_s)
        self._start_s, self._end_s = [0.0] * num_ops, [0.0] * num_ops
        return Late(lambda: moments)


class TimingEvent(Protocol):
    """An event that a stream passes when all work before it is done (torch.Event)."""

    def record(self) -> None:
        """Record it on the current stream of the current device."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, other: Any, /) -> float:
        """Return the milliseconds to a later event; both have been passed."""


@dataclass(slots=True)
class _Recording:
    """The events of one reading; two take turns.

    Args:
        starts: an event before each op.
        ends: an event behind each op.
        mark: the event behind all of them.
        ended: the ops that were recorded.
        marked_s: when the host recorded the mark.
    """

    starts: list[TimingEvent]
    ends: list[TimingEvent]
    mark: TimingEvent
    ended: list[int] = field(default_factory=list)
    marked_s: float = 0.0


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
        def events() -> list[TimingEvent]:
            return [make_event() for _ in range(num_ops)]

        both = [_Recording(events(), events(), make_event()) for _ in range(2)]
        self._turns = cycle(both)
        self._now = next(self._turns)
        self._marks = [make_event() for _ in range(_NUM_MARKS)]
        self._clock = clock
        self._known: tuple[TimingEvent, float] | None = None  # a mark, and its time
        self._last: Late[Times] | None = None

    def start(self, i: int) -> None:
        """See `Stopwatch.start`."""
        self._now.starts[i].record()

    def end(self, i: int) -> None:
        """See `Stopwatch.end`."""
        self._now.ends[i].record()
        self._now.ended.append(i)

    def run(
        self, i: int, compute: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """See `Stopwatch.run`."""
        self.start(i)
        result = compute(*args, **kwargs)
        self.end(i)
        return result

    def read(self) -> Late[Times]:
        """See `Stopwatch.read`."""
        if self._known is None:
            self._known = self._mark_now()
        if self._last is not None:
            _ = self._last.value  # its events are recorded again from now on
        recording = self._now
        recording.mark.record()
        recording.marked_s = self._clock()
        self._last = Late(partial(self._times, recording))
        self._now = next(self._turns)
        return self._last

    def _times(self, recording: _Recording) -> Times:
        """Return when ops began and ended, once the stream has passed their mark.

        Time goes on from mark to mark, and back from a mark to its ops, not on from an
        event of the process's beginning: events give milliseconds in 24 bits. A mark
        was passed after it was recorded, and before the host knew: so the stream's
        clock cannot depart from the host's.
        """
        mark, known = recording.mark, self._known
        assert known is not None
        mark.synchronize()
        passed_s = known[1] + known[0].elapsed_time(mark) / 1e3
        passed_s = min(max(passed_s, recording.marked_s), self._clock())
        self._known = mark, passed_s
        start_s = np.zeros(len(recording.starts))
        end_s = np.zeros(len(recording.ends))
        for i in recording.ended:
            start_s[i] = passed_s - recording.starts[i].elapsed_time(mark) / 1e3
            end_s[i] = passed_s - recording.ends[i].elapsed_time(mark) / 1e3
        recording.ended.clear()
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
