"""Write and read timelines as JSON, for run folders and for pictures.

    {
      "hocket_timeline": 1,                    the version of this form
      "origin": "simulated",
      "schedule": "d0  0F0 0F1 ...",           its text form
      "start_s": [[0.0, 1.0, ...], ...],       of each lane, of each op
      "end_s": [[1.0, 2.0, ...], ...],
      "traffic": {"lane": [0, ...], ...},      the columns of `Traffic`
      "memory": [{"time_s": [...], "amount": [...]}, ...],   of each device, or empty
      "data_waits": [[0, 0.0, 1.0], ...]       device, begin, end; not there if empty
    }

Numbers are written so that they are read back as they were, to the last bit.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

import numpy as np

from hocket.core.formats.documents import read_json
from hocket.core.schedule import Schedule
from hocket.core.timelines.arrays import Floats, Ints
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import DataWait, Origin, Timeline
from hocket.core.timelines.traffic import Traffic
from hocket.errors import ParseError

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


def to_json(timeline: Timeline) -> str:
    """Write a timeline as text that `from_json` reads back to an equal one."""
    traffic = timeline.traffic
    document = {
        "hocket_timeline": VERSION,
        "origin": timeline.origin.value,
        "schedule": str(timeline.schedule),
        "start_s": [column.tolist() for column in timeline.start_s],
        "end_s": [column.tolist() for column in timeline.end_s],
        "traffic": {key: getattr(traffic, key).tolist() for key in _TRAFFIC_KEYS},
        "memory": [
            {"time_s": curve.time_s.tolist(), "amount": curve.amount.tolist()}
            for curve in timeline.memory
        ],
    }
    if timeline.data_waits:
        document[_DATA_WAITS] = [astuple(wait) for wait in timeline.data_waits]
    return json.dumps(document, allow_nan=False)


def from_json(text: str, *, path: str = "<json>") -> Timeline:
    """Read a timeline; `path` is named in errors.

    Raises:
        ParseError: with the path, and the line or the entry.
    """
    try:
        document = read_json(text)
    except ValueError as error:
        raise ParseError(f"{path}: not JSON: {error}") from None
    return _Reader(path).timeline(document)


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

    def floats(self, value: object, where: str) -> Floats:
        """Read a list of finite numbers."""
        if not isinstance(value, list):
            raise self.fault(where, "is not a list")
        for i, number in enumerate(value):
            if type(number) not in (int, float) or not abs(number) <= _MOST:
                raise self.fault(
                    f"{where}[{i}]", f"is {reprlib.repr(number)}, not a finite number"
                )
        return np.array(value, np.float64)

    def ints(self, value: object, where: str, stop: int) -> Ints:
        """Read a list of whole numbers from 0 to below `stop`."""
        if not isinstance(value, list):
            raise self.fault(where, "is not a list")
        for i, number in enumerate(value):
            if type(number) is not int or not 0 <= number < stop:
                raise self.fault(
                    f"{where}[{i}]",
                    f"is {reprlib.repr(number)}, not a whole number below {stop}",
                )
        return np.array(value, np.int64)

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
