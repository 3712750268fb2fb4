"""Draw the lanes of a picture: tracks, steps, ops and messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.core.op import ASYNCHRONOUS, MESSAGES
from hocket.core.program import Program
from hocket.core.timelines.timeline import Span, Timeline
from hocket.draw.palette import KIND_NAMES, stage_tones
from hocket.draw.quantity import percent, seconds
from hocket.draw.scene import Anchor, AreaFill, Box, Path, Role, Shape, Text, TextOn
from hocket.draw.steps import step_ends

if TYPE_CHECKING:
    from hocket.draw.layout import Axis

_GAP = 3.0  # between two lanes
_TEXT = 10.5


def lane_labels(timeline: Timeline) -> tuple[str, ...]:
    """Return the label of each lane."""
    return tuple(lane.label for lane in timeline.schedule.lanes)


def lane_shapes(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    """Draw tracks, steps and ops of all lanes, from `top` down, each `height` high."""
    yield from _tracks(timeline, axis, top, height)
    program = timeline.schedule.program
    tones, names_stages = stage_tones(program), _names_stages(program)
    for span in timeline.spans:
        if span.op.kind not in MESSAGES and span.end_s > span.start_s:
            y = top + span.lane * (height + _GAP)
            fill = AreaFill(span.op.kind, tones[span.op.stage])
            number = span.op.stage if names_stages else span.op.microbatch
            text = "" if number is None else str(number)
            yield from _op(span, text, fill, _place(timeline, axis, span), y, height)


def _names_stages(program: Program) -> bool:
    """Return whether boxes bear stages: of one microbatch, all would bear a 0."""
    is_one = all(net.num_microbatches == 1 for net in program.nets)
    return is_one and any(len(stages) > 1 for stages in program.stages_on)


def transfer_shapes(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    """Draw a thin line per message between the first lanes of two devices."""
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


def span_text(span: Span) -> str:
    """Describe a span in one line, for a pointer's hint."""
    return (
        f"{span.op} {KIND_NAMES[span.op.kind]}, {seconds(span.end_s - span.start_s)} "
        f"from {seconds(span.start_s)}"
    )


def _place(timeline: Timeline, axis: Axis, span: Span) -> tuple[float, float]:
    begin_s = timeline.begin_s
    return axis.x(span.start_s - begin_s), axis.x(span.end_s - begin_s)


def _tracks(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    end = axis.x(timeline.makespan_s)
    right = axis.right + 50
    ends = step_ends(timeline)
    for i, label in enumerate(lane_labels(timeline)):
        y = top + i * (height + _GAP)
        middle = y + height / 2 + 4
        yield Text(axis.left - 8, middle, label, 11.5, Role.INK, Anchor.END)
        yield Box(axis.left, y, end - axis.left, height, Role.TRACK)
        bubble = percent(timeline.lane_bubble_fraction(i))
        yield Text(right, middle, bubble, _TEXT, Role.MUTED, Anchor.END)
        places = [axis.x(float(end_s) - timeline.begin_s) for end_s in ends[i]]
        for begin, stop in zip(places[::2], places[1::2], strict=False):
            yield Box(begin, y, stop - begin, height, Role.BAND)
    if len(ends[0]) > 1:
        yield from _step_labels(timeline, axis, top - 8)


def _step_labels(timeline: Timeline, axis: Axis, y: float) -> Iterator[Shape]:
    """Draw the number of each step above its begin on the first lane, where it fits."""
    begins = [timeline.begin_s, *step_ends(timeline)[0][:-1]]
    free_from = axis.left
    for step, begin_s in enumerate(begins):
        x = axis.x(float(begin_s) - timeline.begin_s)
        if x >= free_from:
            yield Text(x, y, f"step {step}", _TEXT, Role.MUTED)
            free_from = x + 44


def _op(
    span: Span,
    text: str,
    fill: AreaFill,
    place: tuple[float, float],
    y: float,
    height: float,
) -> Iterator[Shape]:
    """Draw a box with a text; for an asynchronous op, a bar at the foot."""
    left, right = place
    gap = min(0.75, 0.15 * (right - left))  # so that neighbours stay apart
    width = max(right - left - gap, 0.25)
    if span.op.kind in ASYNCHRONOUS:
        yield Box(left, y + height - 4, width, 4, fill, hint=span_text(span))
        return
    corner = 2.0 if width > 6 else 0.0
    yield Box(left, y, width, height, fill, corner, span_text(span))
    if text and width >= 6.2 * len(text) + 3:
        middle = y + height / 2 + 3.8
        x = left + width / 2
        yield Text(x, middle, text, _TEXT, TextOn(fill), Anchor.MIDDLE)
