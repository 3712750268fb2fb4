"""Draw messages as thin lines from the sender's lane to the receiver's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.core.timelines.timeline import Timeline
from hocket.draw.scene import Path, Role, Shape

if TYPE_CHECKING:
    from hocket.draw.layout import Axis

_GAP = 3.0


def transfer_shapes(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    """Draw a line per message between the first lanes of two devices."""
    first = {
        lane.device: i for i, lane in reversed(list(enumerate(timeline.schedule.lanes)))
    }
    for transfer in timeline.transfers:
        a, b = first[transfer.from_device], first[transfer.to_device]
        if a == b:
            continue
        y_from, y_to = (top + i * (height + _GAP) + height / 2 for i in (a, b))
        edge = height / 2 if b > a else -height / 2
        start = axis.x(transfer.start_s - timeline.begin_s)
        end = axis.x(transfer.end_s - timeline.begin_s)
        yield Path(((start, y_from + edge), (end, y_to - edge)), Role.INK, width=0.7)
