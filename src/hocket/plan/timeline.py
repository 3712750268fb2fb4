"""When it happened: predicted by the simulator or measured by the runtime, one type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.plan.memory import MemoryCurve, activation_units
from hocket.plan.op import ASYNCHRONOUS, BACKWARDS, Kind, Op
from hocket.plan.schedule import Schedule

Floats = NDArray[np.float64]


class Origin(Enum):
    """How a timeline came to be."""

    SIMULATED = "simulated"
    MEASURED = "measured"
    EMULATED = "emulated"  # real messages, but each op sleeps its profiled time


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one lane. Of ops that only start something, until that has ended."""

    lane: int
    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between devices, or one reduction (from a device to itself)."""

    op: Op  # the op that made what is sent, or the reduction
    from_device: int
    to_device: int
    start_s: float
    end_s: float
    num_bytes: int


@dataclass(frozen=True)
class Timeline:
    """Start and end of every op of a schedule.

    Args:
        schedule: what was done.
        start_s: one array per lane, one entry per op of that lane.
        end_s: likewise.
        transfers: the messages, where they are known.
        memory: bytes over time of each device, where they are known.
        origin: simulated, measured or emulated.
    """

    schedule: Schedule
    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]
    transfers: tuple[Transfer, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    origin: Origin = Origin.SIMULATED

    @property
    def spans(self) -> Iterator[Span]:
        """Every span, lane by lane."""
        for i, lane in enumerate(self.schedule.lanes):
            starts, ends = self.start_s[i].tolist(), self.end_s[i].tolist()
            for op, start_s, end_s in zip(lane.ops, starts, ends, strict=True):
                yield Span(i, op, start_s, end_s)

    @cached_property
    def begin_s(self) -> float:
        """When the first op started."""
        return min((float(s.min()) for s in self.start_s if s.size), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """From the first op's start to the last op's end."""
        last = max((float(e.max()) for e in self.end_s if e.size), default=0.0)
        return last - self.begin_s

    @property
    def bubble_fraction(self) -> float:
        """The share of the makespan in which a lane does not work: mean over lanes."""
        lanes = range(len(self.schedule.lanes))
        return float(np.mean([self.lane_bubble_fraction(lane) for lane in lanes]))

    def lane_bubble_fraction(self, lane: int) -> float:
        """The share of the makespan in which one lane does not work."""
        return self._idle_fraction(lane, self.begin_s, self.begin_s + self.makespan_s)

    @cached_property
    def steady_bubble_fraction(self) -> float:
        """The bubble while the pipeline is full: mean over lanes.

        Of a flush-free order, within its repeating body. Of any other, between the end
        of warm-up (every lane has begun its first backward) and the start of cool-down
        (the first lane has ended its last forward); where these leave nothing between
        them, there is no steady state, and it is the whole bubble.
        """
        windows = [self._steady_window(i) for i in range(len(self.schedule.lanes))]
        if not self.schedule.body:
            begin = max(begin for begin, _ in windows)
            end = min(end for _, end in windows)
            if end <= begin:
                return self.bubble_fraction
            windows = [(begin, end)] * len(windows)
        return float(
            np.mean([self._idle_fraction(i, *w) for i, w in enumerate(windows)])
        )

    def peak_activations(self, device: int) -> float:
        """The most activation units alive at once on a device.

        One unit is what one microbatch leaves behind in a device's whole share of the
        model, from the start of its F to the end of its B (or I).
        """
        return activation_units(self, device).peak

    def peak_bytes(self, device: int) -> float:
        """The most bytes alive at once on a device, where the timeline knows them."""
        return self.memory[device].peak

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes sent from device to device over the whole timeline."""
        total: dict[tuple[int, int], int] = {}
        for transfer in self.transfers:
            link = (transfer.from_device, transfer.to_device)
            total[link] = total.get(link, 0) + transfer.num_bytes
        return total

    @cached_property
    def _works(self) -> tuple[NDArray[np.bool_], ...]:
        """Of each lane's ops, which keep the lane busy."""
        return tuple(
            np.array([op.kind not in ASYNCHRONOUS for op in lane.ops], dtype=bool)
            for lane in self.schedule.lanes
        )

    def _idle_fraction(self, lane: int, begin: float, end: float) -> float:
        if end <= begin:
            return 0.0
        works = self._works[lane]
        starts = np.clip(self.start_s[lane][works], begin, end)
        ends = np.clip(self.end_s[lane][works], begin, end)
        return 1.0 - float((ends - starts).sum()) / (end - begin)

    def _steady_window(self, lane: int) -> tuple[float, float]:
        if self.schedule.body:
            return self._body_window(lane)
        ops, starts, ends = (
            self.schedule.lanes[lane].ops,
            self.start_s[lane],
            self.end_s[lane],
        )
        back = [i for i, op in enumerate(ops) if op.kind in BACKWARDS]
        forward = [i for i, op in enumerate(ops) if op.kind is Kind.FORWARD]
        if not forward:
            return self.begin_s, self.begin_s
        first = back[0] if back else forward[0]
        return float(starts[first]), float(ends[forward[-1]])

    def _body_window(self, lane: int) -> tuple[float, float]:
        """From the body's first op to the first op after it: whole repetitions."""
        begin, end = self.schedule.body[lane]
        starts, ends = self.start_s[lane], self.end_s[lane]
        if begin == end:
            return self.begin_s, self.begin_s
        last = starts[end] if end < len(starts) else ends[end - 1]
        return float(starts[begin]), float(last)
