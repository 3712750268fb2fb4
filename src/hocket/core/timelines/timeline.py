"""Say when each op happened: as the simulator predicts or the runtime measures."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Final

import numpy as np

from hocket.core.formats.documents import read_json
from hocket.core.formats.drawn import Drawn
from hocket.core.op import ASYNCHRONOUS, BACKWARDS, MAKES_WEIGHT_GRAD, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.timelines.arrays import Floats, Ints
from hocket.core.timelines.memory import (
    MemoryCurve,
    Traffic,
    Transfer,
    activation_units,
)
from hocket.core.timelines.steady import Window, num_repeats_in_window, steady_windows
from hocket.errors import ParseError, PlanError


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
        return self.activation_units(device).peak

    def peak_microbatches(self, device: int) -> float:
        """Return the most microbatches at once on a device from their F to B, or W.

        Counted as `peak_activations`, which it exceeds where a W, which needs a part
        of what its F has left, comes later than its I.
        """
        return self.activation_units(device, MAKES_WEIGHT_GRAD).peak

    def activation_units(
        self, device: int, last: frozenset[Kind] = BACKWARDS
    ) -> MemoryCurve:
        """Return the activation units alive on a device over time, until `last`."""
        return activation_units(self.schedule, self.start_s, self.end_s, device, last)

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
        traffic = self.traffic
        document = {
            "hocket_timeline": VERSION,
            "origin": self.origin.value,
            "schedule": str(self.schedule),
            "start_s": [column.tolist() for column in self.start_s],
            "end_s": [column.tolist() for column in self.end_s],
            "traffic": {key: getattr(traffic, key).tolist() for key in _TRAFFIC_KEYS},
            "memory": [
                {"time_s": curve.time_s.tolist(), "amount": curve.amount.tolist()}
                for curve in self.memory
            ],
        }
        if self.data_waits:
            document[_DATA_WAITS] = [astuple(wait) for wait in self.data_waits]
        return json.dumps(document, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, path: str = "<json>") -> Timeline:
        """Read what `to_json` writes; `path` is named in errors.

        Raises:
            ParseError: with the path, and what is wrong where.
        """
        try:
            document = read_json(text)
        except ValueError as error:
            raise ParseError(f"{path}: not JSON: {error}") from None
        return _Reader(path).timeline(document)

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

    @cached_property
    def device_work_s(self) -> tuple[float, ...]:
        """The seconds that each device works, in all of its lanes."""
        total_s = [0.0] * self.schedule.program.num_devices
        for lane, (_, worked_s) in zip(self.schedule.lanes, self._busy_s, strict=True):
            total_s[lane.device] += float(worked_s[-1]) if worked_s.size else 0.0
        return tuple(total_s)

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


# Write and read timelines as JSON, for run folders and for pictures.
#
#     {
#       "hocket_timeline": 1,                    the version of this form
#       "origin": "simulated",
#       "schedule": "d0  0F0 0F1 ...",           its text form
#       "start_s": [[0.0, 1.0, ...], ...],       of each lane, of each op
#       "end_s": [[1.0, 2.0, ...], ...],
#       "traffic": {"lane": [0, ...], ...},      the columns of `Traffic`
#       "memory": [{"time_s": [...], "amount": [...]}, ...],   of each device, or empty
#       "data_waits": [[0, 0.0, 1.0], ...]       device, begin, end; not there if empty
#     }
#
# Numbers are written so that they are read back as they were, to the last bit.

VERSION: Final = 1

_MOST: Final = sys.float_info.max
_INT_STOP: Final = 2**63

_KEYS: Final = (
    "hocket_timeline",
    "origin",
    "schedule",
    "start_s",
    "end_s",
    "traffic",
    "memory",
)
_DATA_WAITS: Final = "data_waits"
_TRAFFIC_KEYS: Final = tuple(column.name for column in fields(Traffic))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the parts of a document, each with the place that errors name."""

    path: str

    def timeline(self, document: object) -> Timeline:
        """Read the whole document."""
        top = self.mapping(document, "the document", _KEYS, optional=(_DATA_WAITS,))
        if top["hocket_timeline"] != VERSION:
            raise self.fault(
                "hocket_timeline",
                f"is {reprlib.repr(top['hocket_timeline'])}, expected {VERSION}",
            )
        if not isinstance(top["schedule"], str):
            raise self.fault("schedule", "is not text")
        schedule = Schedule.parse(top["schedule"], path=f"{self.path}, schedule")
        starts = self.by_lane(top["start_s"], "start_s", schedule)
        ends = self.by_lane(top["end_s"], "end_s", schedule)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if (end < start).any():
                j = int(np.argmax(end < start))
                op = schedule.lanes[i].ops[j]
                raise self.fault(f"end_s[{i}][{j}]", f"{op} ends before it starts")
        return Timeline(
            schedule,
            starts,
            ends,
            self.traffic(top["traffic"], schedule),
            self.memory(top["memory"], schedule),
            self.origin(top["origin"]),
            tuple(self.data_waits(top.get(_DATA_WAITS, []), schedule)),
        )

    def fault(self, where: str, what: str) -> ParseError:
        """Return an error about one place of the document."""
        return ParseError(f"{self.path}: {where} {what}")

    def mapping(
        self,
        value: object,
        where: str,
        keys: Sequence[str],
        optional: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Read a mapping with just these keys, and maybe the optional ones."""
        if not isinstance(value, dict):
            raise self.fault(where, f"is not an object with {', '.join(keys)}")
        for key in keys:
            if key not in value:
                raise self.fault(where, f"has no {key}")
        for key in value:
            if key not in (*keys, *optional):
                raise self.fault(where, f"has {key!r}; known: {', '.join(keys)}")
        return value

    def items(self, value: object, where: str, num_items: int, of: str) -> list[Any]:
        """Read a list with one item for each of something."""
        if not isinstance(value, list):
            raise self.fault(where, "is not a list")
        if len(value) != num_items:
            raise self.fault(
                where, f"holds {len(value)} entries, expected {num_items}, one per {of}"
            )
        return value

    def column(
        self, value: object, where: str, fits: Callable[[Any], bool], what: str
    ) -> list[Any]:
        """Read a list of numbers of one sort."""
        if not isinstance(value, list):
            raise self.fault(where, "is not a list")
        for i, number in enumerate(value):
            if not fits(number):
                raise self.fault(
                    f"{where}[{i}]", f"is {reprlib.repr(number)}, not {what}"
                )
        return value

    def floats(self, value: object, where: str) -> Floats:
        """Read a list of finite numbers."""

        def fits(x: Any) -> bool:  # noqa: ANN401  (JSON is anything)
            return type(x) in (int, float) and abs(x) <= _MOST

        return np.array(self.column(value, where, fits, "a finite number"), np.float64)

    def ints(self, value: object, where: str, stop: int) -> Ints:
        """Read a list of whole numbers from 0 to below `stop`."""

        def fits(x: Any) -> bool:  # noqa: ANN401  (JSON is anything)
            return type(x) is int and 0 <= x < stop

        what = f"a whole number below {stop}"
        return np.array(self.column(value, where, fits, what), np.int64)

    def by_lane(
        self, value: object, where: str, schedule: Schedule
    ) -> tuple[Floats, ...]:
        """Read a number for each op of each lane."""
        lanes = self.items(value, where, len(schedule.lanes), "lane")
        for i, (column, lane) in enumerate(zip(lanes, schedule.lanes, strict=True)):
            self.items(column, f"{where}[{i}]", len(lane.ops), f"op of {lane.label}")
        return tuple(self.floats(c, f"{where}[{i}]") for i, c in enumerate(lanes))

    def origin(self, value: object) -> Origin:
        """Read how the timeline came to be."""
        known = [origin.value for origin in Origin]
        if value not in known:
            raise self.fault(
                "origin", f"is {reprlib.repr(value)}, expected {' or '.join(known)}"
            )
        return Origin(value)

    def traffic(self, value: object, schedule: Schedule) -> Traffic:
        """Read the columns of the transfers, which name existing ops and devices."""
        columns = self.mapping(value, "traffic", _TRAFFIC_KEYS)
        num_devices = schedule.program.num_devices
        lane = self.ints(columns["lane"], "traffic.lane", len(schedule.lanes))
        for key in _TRAFFIC_KEYS:
            self.items(columns[key], f"traffic.{key}", lane.size, "transfer")
        positions = self.ints(columns["position"], "traffic.position", _INT_STOP)
        sizes = np.array([len(one.ops) for one in schedule.lanes], np.int64)
        for i in np.flatnonzero(positions >= sizes[lane])[:1].tolist():
            raise self.fault(
                f"traffic.position[{i}]",
                f"is {positions[i]}, and lane {lane[i]} has {sizes[lane[i]]} ops",
            )
        return Traffic(
            lane,
            positions,
            self.ints(columns["from_device"], "traffic.from_device", num_devices),
            self.ints(columns["to_device"], "traffic.to_device", num_devices),
            self.floats(columns["start_s"], "traffic.start_s"),
            self.floats(columns["end_s"], "traffic.end_s"),
            self.ints(columns["num_bytes"], "traffic.num_bytes", _INT_STOP),
        )

    def memory(self, value: object, schedule: Schedule) -> tuple[MemoryCurve, ...]:
        """Read a curve per device, or none."""
        if value == []:
            return ()
        curves = self.items(value, "memory", schedule.program.num_devices, "device")
        return tuple(self.curve(c, f"memory[{i}]") for i, c in enumerate(curves))

    def data_waits(self, value: object, schedule: Schedule) -> Iterator[DataWait]:
        """Read a device, a begin and an end of each."""
        if not isinstance(value, list):
            raise self.fault(_DATA_WAITS, "is not a list")
        num_devices = schedule.program.num_devices
        for i, row in enumerate(value):
            where = f"{_DATA_WAITS}[{i}]"
            device, *moments = self.items(row, where, 3, "device, begin and end")
            self.ints([device], where, num_devices)
            start_s, end_s = self.floats(moments, where).tolist()
            if end_s < start_s:
                raise self.fault(where, "ends before it starts")
            yield DataWait(device, start_s, end_s)

    def curve(self, value: object, where: str) -> MemoryCurve:
        """Read instants in order, and an amount for each."""
        columns = self.mapping(value, where, ("time_s", "amount"))
        time_s = self.floats(columns["time_s"], f"{where}.time_s")
        self.items(columns["amount"], f"{where}.amount", time_s.size, "instant")
        for i in np.flatnonzero(np.diff(time_s) < 0)[:1].tolist():
            raise self.fault(
                f"{where}.time_s[{i + 1}]",
                f"is {time_s[i + 1]}, after {time_s[i]}; expected an ascending list",
            )
        return MemoryCurve(time_s, self.floats(columns["amount"], f"{where}.amount"))
