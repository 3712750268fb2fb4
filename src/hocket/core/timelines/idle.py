"""Say why lanes are idle: every idle second of a timeline gets one cause.

    d0  F0 F1 ░░░░░░░░░░░░░ B0        d0 cannot begin B0 before the gradient has come:
              └ 1 ┘└─ 2 ─┘└3┘
    d1  ····F0 F1 ░░B0░░░░            1  d1 is idle too, for a reason of its own: d0
                                         has the same reason at that moment
                                      2  d1 works
                                      3  the message is on its way

1. A lane waits for the latest of what its next op needs (`dataflow`). While another
   lane works towards that, it waits for that lane's work; while that lane is idle
   itself, both have the same cause.
2. When a message or a reduction has begun that the op waits for, that is the cause;
   when all has come and the lane still does not begin, it is the batch, while the
   loader has not yielded it, or else the host.
3. Where a lane waits for other lanes' work, as much of it is imbalance as the lane has
   less work than the busiest one: no order can fill it. The rest is warm-up and drain
   before and after the pipeline is full (`steady`), and `OTHER` while it is full.

The causes of a lane add up to its idle time. A measured timeline does not know when a
message has arrived: a lane that was busy when it left is assumed to get it as soon as
the median lane that waited on this link.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from hocket.core.timelines.causality import Causality
from hocket.core.timelines.steady import Window, steady_windows
from hocket.core.timelines.timeline import Timeline


class Cause(Enum):
    """Why a lane does not work. The value is what people read."""

    FILL = "warm-up and drain"
    MESSAGE = "messages"
    REDUCTION = "reductions"
    IMBALANCE = "imbalance"
    OTHER = "other devices"
    HOST = "host"
    DATA = "data"
    JOB = "another job"  # of jobs that share a device; timelines know none


@dataclass(frozen=True, slots=True)
class Wait:
    """A part of a lane's idle time, with one cause.

    Args:
        start_s: when it begins.
        end_s: when it ends.
        cause: why the lane does not work.
        lane: the lane whose work, message or reduction it waits for; None for the host
            and for data.
        to_device: where the message goes that it waits for; None without a message.
    """

    start_s: float
    end_s: float
    cause: Cause
    lane: int | None = None
    to_device: int | None = None

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end_s - self.start_s


@dataclass(frozen=True, eq=False)
class Idle:
    """The idle time of a timeline's lanes, by cause.

    Args:
        timeline: whose idle time it is.
        waits: each lane's waits, in order of time.
    """

    timeline: Timeline
    waits: tuple[tuple[Wait, ...], ...]

    def lane_s(self, lane: int) -> dict[Cause, float]:
        """Return a lane's idle seconds by cause, over the whole timeline."""
        total_s = dict.fromkeys(Cause, 0.0)
        for wait in self.waits[lane]:
            total_s[wait.cause] += wait.seconds
        return total_s

    @cached_property
    def seconds(self) -> dict[Cause, float]:
        """The idle seconds by cause, over the whole timeline: the mean over lanes."""
        lanes = [self.lane_s(lane) for lane in range(len(self.waits))]
        return {cause: sum(of[cause] for of in lanes) / len(lanes) for cause in Cause}

    @cached_property
    def fractions(self) -> dict[Cause, float]:
        """The share of the makespan by cause; together they are the bubble."""
        makespan_s = self.timeline.makespan_s
        if makespan_s <= 0.0:
            return dict.fromkeys(Cause, 0.0)
        return {cause: idle_s / makespan_s for cause, idle_s in self.seconds.items()}


def idle_by_cause(timeline: Timeline) -> Idle:
    """Return the idle time of every lane by cause.

    Raises:
        ScheduleError: ops that are not of the program, or are there twice.
    """
    status = _Status(timeline)
    status.play()
    work_s, lanes = timeline.device_work_s, timeline.schedule.lanes
    windows = steady_windows(timeline.schedule, timeline.start_s, timeline.end_s)
    waits = []
    for number, lane in enumerate(lanes):
        idle = [piece for piece in status.pieces[number] if piece.cause is not None]
        full = windows[number] if windows else []
        quota_s = max(work_s) - work_s[lane.device]
        waits.append(tuple(_named(idle, full, quota_s)))
    return Idle(timeline, tuple(waits))


class _Piece(NamedTuple):
    """A piece of a lane's time.

    Args:
        start_s: when it begins.
        end_s: when it ends.
        cause: why the lane is idle; `OTHER` while it waits for work; None if it works.
        lane: as in `Wait`.
        to_device: as in `Wait`.
    """

    start_s: float
    end_s: float
    cause: Cause | None
    lane: int | None = None
    to_device: int | None = None


class _Status:
    """What each lane does at any time, op by op in order of their starts."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.causality = Causality(timeline)
        self.pieces: list[list[_Piece]] = [[] for _ in timeline.schedule.lanes]
        self._ends: list[list[float]] = [[] for _ in timeline.schedule.lanes]

    def play(self) -> None:
        """Give every piece of every lane's time its cause."""
        causality = self.causality
        start_s, end_s = causality.start_s, causality.end_s
        rows = [row for row in range(len(start_s)) if causality.works[row]]
        for row in sorted(rows, key=lambda row: (start_s[row], end_s[row], row)):
            lane = causality.lane[row]
            begin_s = self._until_s(lane)
            if begin_s < start_s[row]:
                for piece in self._waits(row, begin_s, start_s[row]):
                    self._add(lane, piece)
            working = _Piece(max(begin_s, start_s[row]), end_s[row], None)
            self._add(lane, working)
        self._drain()

    def _drain(self) -> None:
        """Lanes that have ended wait for the lane that ends last."""
        stop_s = self.timeline.begin_s + self.timeline.makespan_s
        lanes = range(len(self.pieces))
        last = max(lanes, key=self._until_s)
        for lane in lanes:
            begin_s = self._until_s(lane)
            for piece in self._blamed(last, begin_s, stop_s):
                self._add(lane, piece)

    def _until_s(self, lane: int) -> float:
        return self._ends[lane][-1] if self._ends[lane] else self.timeline.begin_s

    def _add(self, lane: int, piece: _Piece) -> None:
        """Add a piece of time, or make the last one longer if it is of one kind."""
        if piece.end_s <= piece.start_s:
            return
        pieces, ends = self.pieces[lane], self._ends[lane]
        if pieces and pieces[-1][2:] == piece[2:]:
            pieces[-1] = pieces[-1]._replace(end_s=piece.end_s)
            ends[-1] = piece.end_s
            return
        pieces.append(piece)
        ends.append(piece.end_s)

    def _waits(self, row: int, begin_s: float, stop_s: float) -> Iterator[_Piece]:
        """Yield why a lane is idle before an op, in order of time."""
        need = self.causality.latest(row)
        if need is None or need.ready_s <= begin_s:
            yield from self._host(row, begin_s, stop_s)
            return
        sent_s, ready_s = min(need.sent_s, stop_s), min(need.ready_s, stop_s)
        yield from self._blamed(need.lane, begin_s, sent_s)
        cause = Cause.MESSAGE if need.to_device is not None else Cause.REDUCTION
        sent_s = max(begin_s, sent_s)
        yield _Piece(sent_s, ready_s, cause, need.lane, need.to_device)
        yield from self._host(row, ready_s, stop_s)

    def _host(self, row: int, begin_s: float, stop_s: float) -> Iterator[_Piece]:
        """Yield a time in which all is there that an op needs of other ops."""
        for start_s, end_s, is_data in self.causality.of_host(row, begin_s, stop_s):
            yield _Piece(start_s, end_s, Cause.DATA if is_data else Cause.HOST)

    def _blamed(self, lane: int, begin_s: float, stop_s: float) -> Iterator[_Piece]:
        """Yield what a lane did for those that waited for it meanwhile."""
        pieces = self.pieces[lane]
        for number in range(bisect_right(self._ends[lane], begin_s), len(pieces)):
            piece = pieces[number]
            if piece.start_s >= stop_s:
                return
            start_s, end_s = max(begin_s, piece.start_s), min(stop_s, piece.end_s)
            if piece.cause is None:
                yield _Piece(start_s, end_s, Cause.OTHER, lane)
            else:
                yield _Piece(start_s, end_s, *piece[2:])
            begin_s = end_s
        if begin_s < stop_s:
            yield _Piece(begin_s, stop_s, Cause.OTHER, lane)


def _named(
    pieces: Sequence[_Piece], full: Sequence[Window], quota_s: float
) -> Iterator[Wait]:
    """Say of each wait for work whether it is imbalance, warm-up, drain or neither.

    Args:
        pieces: a lane's idle time.
        full: when the pipeline is full.
        quota_s: how much less work the lane has than the busiest one.
    """
    parts = [part for piece in pieces for part in _cut(piece, full)]
    inside = [number for number, (_, is_full) in enumerate(parts) if is_full]
    outside = [number for number, (_, is_full) in enumerate(parts) if not is_full]
    uneven_s = [0.0] * len(parts)
    for number in (*inside, *outside):
        piece, _ = parts[number]
        if piece.cause is Cause.OTHER:
            uneven_s[number] = min(quota_s, piece.end_s - piece.start_s)
            quota_s -= uneven_s[number]
    for (piece, is_full), taken_s in zip(parts, uneven_s, strict=True):
        assert piece.cause is not None, "only idle time has a cause"
        rest = piece.cause
        if rest is Cause.OTHER and not is_full:
            rest = Cause.FILL
        middle_s = piece.start_s + taken_s
        to = piece.lane, piece.to_device
        if taken_s > 0.0:
            yield Wait(piece.start_s, middle_s, Cause.IMBALANCE, *to)
        if middle_s < piece.end_s:
            yield Wait(middle_s, piece.end_s, rest, *to)


def _cut(piece: _Piece, full: Sequence[Window]) -> Iterator[tuple[_Piece, bool]]:
    """Cut a piece where the pipeline becomes full, and where it begins to drain."""
    begin_s = piece.start_s
    for window_s, until_s in full:
        edges = [max(begin_s, min(edge, piece.end_s)) for edge in (window_s, until_s)]
        for edge_s, is_full in zip(edges, (False, True), strict=True):
            if begin_s < edge_s:
                yield _Piece(begin_s, edge_s, *piece[2:]), is_full
                begin_s = edge_s
    if begin_s < piece.end_s:
        yield _Piece(begin_s, *piece[1:]), False
