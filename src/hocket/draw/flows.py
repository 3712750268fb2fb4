"""Find which op waited for which message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hocket.core.dataflow import Value, makes, needs
from hocket.core.op import MESSAGES
from hocket.core.timelines.timeline import Timeline

# The index of an op's lane, and its position in that lane.
OpPosition = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Flow:
    """A message, from the op that made its value to an op that read it."""

    transfer: int  # its row in the timeline's traffic
    maker: OpPosition
    reader: OpPosition


def flows(timeline: Timeline) -> Iterator[Flow]:
    """Yield every message with each of its readers, in the order of lanes and ops.

    Reductions, which end on the device where they began, are not among them.
    """
    schedule = timeline.schedule
    sent: dict[tuple[Value, int], int] = {}
    makers: list[OpPosition] = []
    traffic = timeline.traffic
    columns = traffic.lane, traffic.position, traffic.from_device, traffic.to_device
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (*place, from_device, to_device) in enumerate(rows):
        makers.append((place[0], place[1]))
        if from_device != to_device:
            op = schedule.lanes[place[0]].ops[place[1]]
            # A send makes nothing: what it needs is what it carries.
            carried = makes(op, schedule.program) or needs(op, schedule.program)
            sent.update({(value, to_device): row for value in carried})
    for i, lane in enumerate(schedule.lanes if sent else ()):
        for j, op in enumerate(lane.ops):
            if op.kind in MESSAGES:
                continue
            for value in needs(op, schedule.program):
                found = sent.get((value, lane.device))
                if found is not None:
                    yield Flow(found, makers[found], (i, j))
