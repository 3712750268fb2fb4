"""Find what each op of a timeline waited for, and until when.

d1  ··F0 ├──────┤                     sent_s   the maker has ended, or the
         sent_s  ready_s                       reduction has begun
d2  ░░░░░░░░░░░░░F0                   ready_s  the value is there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from hocket.core.gates import gates_of
from hocket.core.op import ASYNCHRONOUS, COLLECTIVES, Op
from hocket.core.simulator.columns import Columns
from hocket.core.simulator.needs import LOCAL, Needs, gate_waits
from hocket.core.timelines.timeline import DataWait, Origin, Timeline


class Need(NamedTuple):
    """Something that an op of a lane needs from another lane, or from a reduction.

    Args:
        row: the op that makes it.
        lane: the lane of that op.
        sent_s: when that op has ended; of a reduction, when it has begun.
        ready_s: when it is there.
        to_device: where the message goes; None without a message.
    """

    row: int
    lane: int
    sent_s: float
    ready_s: float
    to_device: int | None


class Causality:
    """The ops of a timeline as rows, and what each of them needs.

    Args:
        timeline: any timeline of a whole schedule.

    Attributes:
        start_s: the start of each op, lane after lane.
        end_s: the end of each op.
        lane: the lane of each op.
        works: whether an op keeps its lane busy.
        before: the row of the op that kept the same lane busy before; -1 for the first.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Read the needs of all ops.

        Raises:
            ScheduleError: ops that are not of the program, or are there twice.
        """
        schedule = timeline.schedule
        columns = Columns.of(schedule)
        self._needs = Needs.of(columns, schedule.program)
        self.start_s: list[float] = np.concatenate(timeline.start_s).tolist()
        self.end_s: list[float] = np.concatenate(timeline.end_s).tolist()
        self.lane: list[int] = columns.lane.tolist()
        self.works: list[bool] = (~columns.is_any(ASYNCHRONOUS)).tolist()
        self._device: list[int] = columns.device.tolist()
        self._data_waits = defaultdict[int, list[DataWait]](list)
        for wait in timeline.data_waits:
            self._data_waits[wait.device].append(wait)
        self._reduces: list[bool] = columns.is_any(COLLECTIVES).tolist()
        self.before = self._rows_before()
        self._is_exact = timeline.origin is Origin.SIMULATED
        first = np.array(columns.first)
        traffic = timeline.traffic
        maker = first[traffic.lane] + traffic.position
        self._arrived_s: dict[tuple[int, int], float] = dict(
            zip(
                zip(maker.tolist(), traffic.to_device.tolist(), strict=True),
                traffic.end_s.tolist(),
                strict=True,
            )
        )
        rows = np.arange(columns.num_ops + 1)
        self._from: list[int] = np.searchsorted(self._needs.row, rows).tolist()
        self._maker: list[int] = self._needs.maker.tolist()
        self._is_remote: list[bool] = (self._needs.arrival != LOCAL).tolist()
        self._usual_s = {} if self._is_exact else self._medians()
        gates = gates_of(schedule, clips=False)
        self._gate_makers = defaultdict[int, list[int]](list)
        for update, gradient in zip(
            *gate_waits(columns, self._needs, gates), strict=True
        ):
            self._gate_makers[int(update)].append(int(gradient))

    def latest(self, row: int) -> Need | None:
        """Return what came last of what an op needs; None if nothing had to come."""
        found = list(self._waited(row))
        return max(found, key=lambda need: need.ready_s, default=None)

    def of_host(
        self, row: int, begin_s: float, stop_s: float
    ) -> Iterator[tuple[float, float, bool]]:
        """Cut a time in which nothing but the host kept an op from its begin.

        Yields:
            When a part begins, when it ends, and whether the device waited for a batch.
        """
        for wait in self._data_waits[self._device[row]]:
            start_s, end_s = max(begin_s, wait.start_s), min(stop_s, wait.end_s)
            if start_s < end_s:
                yield begin_s, start_s, False
                yield start_s, end_s, True
                begin_s = end_s
        yield begin_s, stop_s, False

    def _waited(self, row: int) -> Iterator[Need]:
        """Yield what an op needs of other lanes and of reductions."""
        for number in range(self._from[row], self._from[row + 1]):
            maker = self._maker[number]
            if maker < 0:  # it was there before, or is never made
                continue
            lane, end_s = self.lane[maker], self.end_s[maker]
            if self._reduces[maker]:
                yield Need(maker, lane, self.start_s[maker], end_s, None)
            elif self._is_remote[number]:
                to_device = self._device[row]
                ready_s = self._ready_s(row, maker, to_device)
                yield Need(maker, lane, end_s, ready_s, to_device)
            elif lane != self.lane[row]:
                yield Need(maker, lane, end_s, end_s, None)
        for maker in self._gate_makers[row]:  # none, where a simulation has no gates
            if self.end_s[maker] <= self.start_s[row]:
                sent_s = (self.start_s if self._reduces[maker] else self.end_s)[maker]
                yield Need(maker, self.lane[maker], sent_s, self.end_s[maker], None)

    def _ready_s(self, row: int, maker: int, to_device: int) -> float:
        """Return when a message has arrived; of a measured one, when it should have."""
        sent_s = self.end_s[maker]
        arrived_s = self._arrived_s.get((maker, to_device), sent_s)
        before = self.before[row]
        if self._is_exact or before < 0 or sent_s > self.end_s[before]:
            return arrived_s
        usual_s = self._usual_s.get((self._device[maker], to_device), 0.0)
        return min(arrived_s, sent_s + usual_s)

    def _medians(self) -> dict[tuple[int, int], float]:
        """Return the median seconds of messages that a lane waited for, by link."""
        taken: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for row, before in enumerate(self.before):
            for number in range(self._from[row], self._from[row + 1]):
                maker = self._maker[number]
                if not self._is_remote[number] or maker < 0 or before < 0:
                    continue
                to_device, sent_s = self._device[row], self.end_s[maker]
                arrived_s = self._arrived_s.get((maker, to_device), sent_s)
                if sent_s > self.end_s[before]:
                    link = self._device[maker], to_device
                    taken[link].append(arrived_s - sent_s)
        return {link: median(seconds) for link, seconds in taken.items()}

    def _rows_before(self) -> list[int]:
        last: dict[int, int] = {}
        before = []
        for row, lane in enumerate(self.lane):
            before.append(last.get(lane, -1))
            if self.works[row]:
                last[lane] = row
        return before


# Find the chain of work and waits that makes a timeline as long as it is.
#
# d0  F0━F1 B0 B1━━U     ━ the critical path: whatever on it becomes shorter may make
#       ┃        ┃         the whole shorter; what is beside it does not
# d1    F0━B0 F1━B1
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
