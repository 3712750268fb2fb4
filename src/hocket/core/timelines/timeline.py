"""Say when each op happened: as the simulator predicts or the runtime measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property

import numpy as np

from hocket.core.formats.drawn import Drawn
from hocket.core.op import ASYNCHRONOUS, Op
from hocket.core.schedule import Schedule
from hocket.core.timelines.arrays import Floats
from hocket.core.timelines.memory import MemoryCurve, activation_units
from hocket.core.timelines.steady import Window, num_repeats_in_window, steady_windows
from hocket.core.timelines.traffic import Traffic, Transfer
from hocket.errors import PlanError


class Origin(Enum):
    """How a timeline came to be."""

    SIMULATED = "simulated"
    MEASURED = "measured"
    EMULATED = "emulated"  # real messages, but each op sleeps its profiled time


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one lane; an asynchronous op lasts until its result is there."""

    lane: int
    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DataWait:
    """A time in which a device waited for its loader; no op ran that reads the batch.

    Args:
        device: the device.
        start_s: when it asked for the batch.
        end_s: when the batch was there.
    """

    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(Drawn):
    """Start and end of every op of a schedule.

    Args:
        schedule: what was done.
        start_s: one array per lane, one entry per op of that lane.
        end_s: one array per lane, one entry per op of that lane.
        traffic: the messages and reductions, if they are known.
        memory: the bytes of each device over time, if they are known.
        origin: simulated, measured or emulated.
        data_waits: the waits for batches, each device's in order of time. The time
            before the first op is part of the timeline from the first wait on.
    """

    schedule: Schedule
    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]
    traffic: Traffic = field(default_factory=Traffic)
    memory: tuple[MemoryCurve, ...] = ()
    origin: Origin = Origin.SIMULATED
    data_waits: tuple[DataWait, ...] = ()

    def __repr__(self) -> str:
        """Return one line."""
        return (
            f"<hocket.Timeline {self.origin.value} makespan_s={self.makespan_s:.4g} "
            f"bubble_fraction={self.bubble_fraction:.3f} of {self.schedule!r}>"
        )

    @property
    def spans(self) -> Iterator[Span]:
        """Every span, lane by lane."""
        for i, lane in enumerate(self.schedule.lanes):
            starts, ends = self.start_s[i].tolist(), self.end_s[i].tolist()
            for op, start_s, end_s in zip(lane.ops, starts, ends, strict=True):
                yield Span(i, op, start_s, end_s)

    @property
    def transfers(self) -> Iterator[Transfer]:
        """Every message and reduction, in order of start."""
        traffic, lanes = self.traffic, self.schedule.lanes
        columns = [getattr(traffic, column.name) for column in fields(traffic)]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for lane, position, *rest in rows:
            yield Transfer(lanes[lane].ops[position], *rest)

    @cached_property
    def begin_s(self) -> float:
        """When the first op started, or the first wait for a batch before it."""
        first = [float(s.min()) for s in self.start_s if s.size]
        return min((*first, *(wait.start_s for wait in self.data_waits)), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """From `begin_s` to the last op's end."""
        last = max((float(e.max()) for e in self.end_s if e.size), default=0.0)
        return last - self.begin_s

    @cached_property
    def step_s(self) -> float:
        """The mean duration of the timeline's steps.

        For a flush-free order, the duration of one repetition of its body while the
        pipeline is full; the mean over lanes.
        """
        num_windowed = num_repeats_in_window(self.schedule)
        if not num_windowed:
            return self.makespan_s / self.schedule.program.num_steps
        windows = steady_windows(self.schedule, self.start_s, self.end_s)
        lasted = [end - begin for lane in windows for begin, end in lane]
        return sum(lasted) / len(lasted) / num_windowed

    @cached_property
    def bubble_fraction(self) -> float:
        """The share of the makespan in which a lane does not work: mean over lanes."""
        return self._mean_idle_fraction([[self._whole]] * len(self.schedule.lanes))

    def lane_bubble_fraction(self, lane: int) -> float:
        """Return the share of the makespan in which one lane does not work."""
        return self._idle_fraction(lane, [self._whole])

    @cached_property
    def steady_bubble_fraction(self) -> float:
        """The bubble while the pipeline is full: mean over lanes.

        For a flush-free order, within its repeating body; for any other, between the
        end of warm-up and the start of cool-down of each step. If there is no such
        time, there is no steady state, and it is the whole bubble. See `steady`.
        """
        windows = steady_windows(self.schedule, self.start_s, self.end_s)
        return self._mean_idle_fraction(windows) if windows else self.bubble_fraction

    def peak_activations(self, device: int) -> float:
        """Return the most activation units alive at once on a device.

        One unit is what one microbatch leaves behind in a device's whole share of the
        model, from the start of its F to the end of its B (or I). Nets without
        backwards leave nothing.
        """
        return activation_units(self, device).peak

    def peak_bytes(self, device: int) -> float:
        """Return the most bytes alive at once on a device.

        Raises:
            PlanError: the timeline does not know them.
        """
        if not self.memory:
            raise PlanError(
                f"this {self.origin.value} timeline holds no bytes over time: "
                "peak_activations counts activations without them"
            )
        return self.memory[device].peak

    @property
    def most_bytes(self) -> float:
        """The peak bytes of the device that holds most."""
        return max(map(self.peak_bytes, range(self.schedule.program.num_devices)))

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes sent from device to device over the whole timeline.

        A reduction counts as from a device to itself, with the bytes that are reduced.
        """
        traffic, num_devices = self.traffic, self.schedule.program.num_devices
        pair = traffic.from_device * num_devices + traffic.to_device
        pairs, which = np.unique(pair, return_inverse=True)
        total = np.zeros(pairs.size, np.int64)
        np.add.at(total, which, traffic.num_bytes)
        return {
            divmod(pair, num_devices): num_bytes
            for pair, num_bytes in zip(pairs.tolist(), total.tolist(), strict=True)
        }

    def to_json(self) -> str:
        """Write the timeline as text that `from_json` reads."""
        from hocket.core.timelines.timeline_json import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str, *, path: str = "<json>") -> Timeline:
        """Read what `to_json` writes; `path` is named in errors.

        Raises:
            ParseError: with the path, and what is wrong where.
        """
        from hocket.core.timelines.timeline_json import from_json

        return from_json(text, path=path)

    @property
    def _whole(self) -> Window:
        return self.begin_s, self.begin_s + self.makespan_s

    @cached_property
    def _busy_s(self) -> tuple[tuple[Floats, Floats], ...]:
        """A curve for each lane: instants, and the seconds it has worked until then.

        An asynchronous op keeps its lane no time.
        """
        curves = []
        for lane, starts, ends in zip(
            self.schedule.lanes, self.start_s, self.end_s, strict=True
        ):
            works = np.array([op.kind not in ASYNCHRONOUS for op in lane.ops], bool)
            edges = np.column_stack((starts[works], ends[works]))
            lengths = edges[:, 1] - edges[:, 0]
            worked = np.cumsum(lengths)
            amounts = np.column_stack((worked - lengths, worked))
            curves.append((edges.ravel(), amounts.ravel()))
        return tuple(curves)

    def _mean_idle_fraction(self, windows: Sequence[Sequence[Window]]) -> float:
        idle = [self._idle_fraction(i, of_one) for i, of_one in enumerate(windows)]
        return float(np.mean(idle))

    def _idle_fraction(self, lane: int, windows: Sequence[Window]) -> float:
        """Return the share of some windows in which a lane does not work."""
        begin_s, end_s = np.array(windows).T
        total_s = float((end_s - begin_s).sum())
        if total_s <= 0.0:
            return 0.0
        instants, worked_s = self._busy_s[lane]
        if not instants.size:
            return 1.0
        busy_s = np.interp(end_s, instants, worked_s) - np.interp(
            begin_s, instants, worked_s
        )
        return max(0.0, 1.0 - float(busy_s.sum()) / total_s)
