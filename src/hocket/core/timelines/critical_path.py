"""Find the chain of work and waits that makes a timeline as long as it is.

d0  F0━F1 B0 B1━━U     ━ the critical path: whatever on it becomes shorter may make
      ┃        ┃         the whole shorter; what is beside it does not
d1    F0━B0 F1━B1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hocket.core.op import Op
from hocket.core.timelines.causality import Causality, Need
from hocket.core.timelines.timeline import Timeline


class PathKind(Enum):
    """What a part of the critical path is. The value is what people read."""

    WORK = "work"
    MESSAGE = "messages"
    REDUCTION = "reductions"
    HOST = "host"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A part of the critical path.

    Args:
        part: what it is.
        lane: the lane of the op that works, sends or reduces, or that begins late for
            the host or for data.
        op: the op on that lane.
        start_s: when it begins.
        end_s: when it ends.
        to_device: the device that a message goes to; None for all else.
    """

    part: PathKind
    lane: int
    op: Op
    start_s: float
    end_s: float
    to_device: int | None = None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The segments, in order of time: from the timeline's begin to the last op's end.

    Args:
        timeline: the timeline.
        segments: the segments of the path, each beginning where the last one ends.
    """

    timeline: Timeline
    segments: tuple[PathSegment, ...]

    @cached_property
    def seconds(self) -> dict[PathKind, float]:
        """The seconds of each kind of part: together they are the makespan."""
        total_s = dict.fromkeys(PathKind, 0.0)
        for segment in self.segments:
            total_s[segment.part] += segment.seconds
        return total_s

    @cached_property
    def link_s(self) -> dict[tuple[int, int], float]:
        """The seconds of messages on it, by `(from_device, to_device)`."""
        lanes, total_s = self.timeline.schedule.lanes, dict[tuple[int, int], float]()
        for segment in self.segments:
            if segment.to_device is not None:
                link = lanes[segment.lane].device, segment.to_device
                total_s[link] = total_s.get(link, 0.0) + segment.seconds
        return total_s


def critical_path(timeline: Timeline) -> CriticalPath:
    """Return the chain that ends with the op that ends last.

    Raises:
        ScheduleError: ops that are not of the program, or are there twice.
    """
    backwards = _Walk(timeline).segments()
    kept = [segment for segment in backwards if segment.seconds > 0.0]
    return CriticalPath(timeline, tuple(reversed(kept)))


class _Walk:
    """Goes back from op to op."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.causality = Causality(timeline)
        self.ops = [op for lane in timeline.schedule.lanes for op in lane.ops]

    def segments(self) -> Iterator[PathSegment]:
        """Yield the path from its end to its begin."""
        causality, begin_s = self.causality, self.timeline.begin_s
        if not self.ops:
            return
        row = max(range(len(self.ops)), key=lambda row: causality.end_s[row])
        stop_s = causality.end_s[row]
        for _ in range(2 * len(self.ops)):  # ops and reductions are met once each
            start_s = min(causality.start_s[row], stop_s)
            yield self._segment(PathKind.WORK, row, start_s, stop_s)
            before, need = causality.before[row], causality.latest(row)
            free_s = causality.end_s[before] if before >= 0 else begin_s
            if need is not None and need.ready_s > free_s:
                ready_s = min(need.ready_s, start_s)
                yield from self._host(row, ready_s, start_s)
                yield self._arrival(need, ready_s)
                row, stop_s = need.row, min(need.sent_s, ready_s)
                if causality.works[row]:
                    continue
                # A reduction has begun when its lane came to it.
                before = causality.before[row]
                free_s, start_s = stop_s, stop_s
            else:
                free_s = min(free_s, start_s)
                yield from self._host(row, free_s, start_s)
            if before < 0:
                return
            row, stop_s = before, free_s

    def _host(self, row: int, begin_s: float, end_s: float) -> Iterator[PathSegment]:
        """Yield the time before an op in which nothing but the host or data is late."""
        parts = list(self.causality.of_host(row, begin_s, end_s))
        for start_s, stop_s, is_data in reversed(parts):
            part = PathKind.DATA if is_data else PathKind.HOST
            yield self._segment(part, row, start_s, stop_s)

    def _segment(
        self, part: PathKind, row: int, start_s: float, end_s: float
    ) -> PathSegment:
        return PathSegment(
            part, self.causality.lane[row], self.ops[row], start_s, end_s
        )

    def _arrival(self, need: Need, ready_s: float) -> PathSegment:
        part = PathKind.REDUCTION if need.to_device is None else PathKind.MESSAGE
        sent_s = min(need.sent_s, ready_s)
        op = self.ops[need.row]
        return PathSegment(part, need.lane, op, sent_s, ready_s, need.to_device)
