"""Lay timelines out on a page: one panel below the other, on one time axis.

    title                                   makespan  bubble  steady
    step 0              step 1
    d0 ┃▇▇▇▇▇▇   ▇▇▇▇▇▇▇▇▇▇▇▇     ▇▇▇▇▇▇▇▇▇▇▇▇┃ 27.3 %   lanes
    d1 ┃  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇     ▇▇▇▇▇▇▇▇▇▇▇▇ ┃ 27.3 %
       0       10       20       30 s                   axis
    d0 ┃▁▂▃▄▄▄▄▄▄▄▄▄▄▄▄▃▂▁                    ┃ 4        memory
    d1 ┃ ▁▂▃▃▃▃▃▃▃▃▃▃▃▃▃▂▁                    ┃ 3
    legend

Every panel says what its timeline comes to, so that a picture can stand alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.core.op import ASYNCHRONOUS, MESSAGES, Kind
from hocket.core.program import Program
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Span, Timeline
from hocket.draw.palette import KIND_NAMES, paler_note, stage_tones
from hocket.draw.quantity import Unit, byte_unit, percent, seconds, ticks, time_unit
from hocket.draw.scene import (
    Anchor,
    AreaFill,
    Axis,
    Box,
    Path,
    Point,
    Role,
    Scene,
    Shape,
    Text,
    TextOn,
)
from hocket.draw.summary import knows_bytes, memory_curves, step_ends
from hocket.errors import PlanError

Titled = tuple[str, Timeline]


@dataclass(frozen=True, slots=True)
class Style:
    """What to show, and how large.

    Args:
        width: the page's width, in points.
        show_memory: whether each device's memory is drawn below the lanes.
        show_transfers: whether each message is drawn as a thin line.
        show_legend: whether a legend of the colours is drawn.
    """

    width: float = 960.0
    show_memory: bool = True
    show_transfers: bool = False
    show_legend: bool = True


MARGIN = 20.0
_SMALL, _NORMAL = 10.5, 13.0


def lay_out(
    timelines: Timeline | Sequence[Titled], title: str = "", style: Style | None = None
) -> Scene:
    """Turn one timeline, or several with their titles, into shapes.

    Raises:
        PlanError: no timeline was given, or the width leaves no room for lanes.
    """
    style = style or Style()
    panels = as_panels(timelines)
    axis = _axis(panels, style)
    shapes: list[Shape] = []
    y = MARGIN
    if title:
        shapes.append(Text(MARGIN, y + 13, title, 16.0, bold=True))
        y += 34
    for name, timeline in panels:
        panel = _Panel(name, timeline, axis, style)
        shapes += panel.shapes(y)
        y += panel.height + 18
    if style.show_legend:
        shapes += _legend([timeline for _, timeline in panels], y)
        y += 26
    height = y - 18 + MARGIN if not style.show_legend else y - 8 + MARGIN
    page = Box(0, 0, style.width, height, Role.PAGE)
    name = title or ", ".join(name for name, _ in panels if name) or "timeline"
    return Scene(style.width, height, (page, *shapes), name)


def as_panels(timelines: Timeline | Sequence[Titled]) -> list[Titled]:
    """Return one timeline, or several with titles, as a list that is not empty."""
    if isinstance(timelines, Timeline):
        return [("", timelines)]
    if not timelines:
        raise PlanError("there is no timeline to draw: give at least one")
    return list(timelines)


def _axis(panels: Sequence[Titled], style: Style) -> Axis:
    lanes = (lane for _, timeline in panels for lane in timeline.schedule.lanes)
    left = MARGIN + 10 + 7 * max((len(lane.label) for lane in lanes), default=0)
    right = style.width - MARGIN - 50
    if right - left < 100:
        raise PlanError(
            f"a picture {style.width:g} wide leaves {right - left:g} for the lanes; "
            f"make it at least {style.width + 100 - right + left:g} wide"
        )
    longest_s = max(timeline.makespan_s for _, timeline in panels)
    return Axis(left, right, longest_s)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One timeline's part of the page."""

    title: str
    timeline: Timeline
    axis: Axis
    style: Style

    @property
    def lane_height(self) -> float:
        return 24.0 if len(self.timeline.schedule.lanes) <= 8 else 18.0

    @property
    def strip_height(self) -> float:
        return 20.0 if self.timeline.schedule.program.num_devices <= 8 else 13.0

    @property
    def head_height(self) -> float:
        return 20.0 + (16.0 if self.timeline.schedule.program.num_steps > 1 else 0.0)

    @property
    def lanes_height(self) -> float:
        return len(self.timeline.schedule.lanes) * (self.lane_height + 3) - 3

    @property
    def height(self) -> float:
        height = self.head_height + self.lanes_height + 22
        if self.style.show_memory:
            num_devices = self.timeline.schedule.program.num_devices
            height += 20 + num_devices * (self.strip_height + 3)
        return height

    def shapes(self, y: float) -> Iterator[Shape]:
        """Draw everything of the panel, whose top is at `y`."""
        yield from self._head(y)
        top = y + self.head_height
        yield from lane_shapes(self.timeline, self.axis, top, self.lane_height)
        if self.style.show_transfers:
            yield from transfer_shapes(self.timeline, self.axis, top, self.lane_height)
        bottom = top + self.lanes_height
        yield from _ticks(self.axis, bottom)
        if self.style.show_memory:
            yield from memory_shapes(
                self.timeline, self.axis, bottom + 42, self.strip_height
            )

    def _head(self, y: float) -> Iterator[Shape]:
        line = self.timeline
        facts = (
            f"{seconds(line.makespan_s)}, bubble {percent(line.bubble_fraction)}, "
            f"steady {percent(line.steady_bubble_fraction)}"
        )
        if self.title:
            yield Text(MARGIN, y + 12, self.title, _NORMAL, bold=True)
            yield Text(self.axis.right, y + 12, facts, 12.0, Role.MUTED, Anchor.END)
        else:
            yield Text(MARGIN, y + 12, facts, 12.0, Role.MUTED)
        right = self.style.width - MARGIN
        bottom = y + self.head_height - 8
        yield Text(right, bottom, "bubble", _SMALL, Role.MUTED, Anchor.END)


def _ticks(axis: Axis, y: float) -> Iterator[Shape]:
    """Draw the axis below the lanes."""
    unit = time_unit(axis.longest_s)
    yield Path(((axis.left, y + 4), (axis.right, y + 4)), Role.GRID)
    marks = ticks(axis.longest_s / unit.size, 10)
    for mark in marks:
        x = axis.x(mark * unit.size)
        yield Path(((x, y + 4), (x, y + 8)), Role.MUTED)
        text = f"{mark:g} {unit.name}" if mark == marks[-1] else f"{mark:g}"
        yield Text(x, y + 19, text, _SMALL, Role.MUTED, Anchor.MIDDLE)


def _legend(timelines: Sequence[Timeline], y: float) -> Iterator[Shape]:
    spans = (span for timeline in timelines for span in timeline.spans)
    found = {span.op.kind for span in spans if span.end_s > span.start_s}
    x = MARGIN
    for kind in Kind:
        if kind not in found or kind in MESSAGES:
            continue
        yield Box(x, y, 12, 12, AreaFill(kind), corner=2)
        yield Text(x + 17, y + 10, KIND_NAMES[kind], 11.5, Role.INK)
        x += 17 + 6.2 * len(KIND_NAMES[kind]) + 18
    if note := paler_note(timeline.schedule.program for timeline in timelines):
        yield Text(x, y + 10, note, 11.5, Role.MUTED)


# Draw the lanes of a picture: tracks, steps, ops and messages.

_GAP = 3.0  # between two lanes
_TEXT = 10.5


def lane_shapes(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    """Draw tracks, steps and ops of all lanes, from `top` down, each `height` high."""
    yield from _tracks(timeline, axis, top, height)
    program = timeline.schedule.program
    tones, names_stages = stage_tones(program), _names_stages(program)
    # What runs beside its lane comes last: the ops that it runs beside would cover it.
    for span in sorted(timeline.spans, key=lambda span: span.op.kind in ASYNCHRONOUS):
        if span.op.kind not in MESSAGES and span.end_s > span.start_s:
            y = top + span.lane * (height + _GAP)
            fill = AreaFill(span.op.kind, tones[span.op.stage])
            number = span.op.stage if names_stages else span.op.microbatch
            text = "" if number is None else str(number)
            ends_s = span.start_s - timeline.begin_s, span.end_s - timeline.begin_s
            left, right = map(axis.x, ends_s)
            yield from _op(span, text, fill, (left, right), y, height)


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


def _tracks(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    end = axis.x(timeline.makespan_s)
    right = axis.right + 50
    ends = step_ends(timeline)
    for i, lane in enumerate(timeline.schedule.lanes):
        y = top + i * (height + _GAP)
        middle = y + height / 2 + 4
        yield Text(axis.left - 8, middle, lane.label, 11.5, Role.INK, Anchor.END)
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


# Draw the memory of each device over time, as strips below the lanes.
def memory_unit(timeline: Timeline) -> Unit:
    """Return the unit of bytes that fits, or that of microbatches' activations."""
    if not knows_bytes(timeline):
        return Unit("", 1.0)
    return byte_unit(timeline.most_bytes)


def memory_title(timeline: Timeline) -> str:
    """Say what the curves show."""
    if knows_bytes(timeline):
        return f"memory, {memory_unit(timeline).name}"
    return "activations alive, in microbatches"


def memory_shapes(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    """Draw one strip per device, all of one scale, from `top` down."""
    curves = memory_curves(timeline)
    unit = memory_unit(timeline)
    highest = max((curve.peak for curve in curves), default=0.0) or 1.0
    right = axis.right + 50
    yield Text(axis.left, top - 7, memory_title(timeline), _SMALL, Role.MUTED)
    yield Text(right, top - 7, "peak", _SMALL, Role.MUTED, Anchor.END)
    for device, curve in enumerate(curves):
        y = top + device * (height + _GAP)
        base = y + height
        middle = base - height / 2 + 4
        yield Text(axis.left - 8, middle, f"d{device}", 11.5, Role.INK, Anchor.END)
        end = axis.x(timeline.makespan_s)
        yield Box(axis.left, y, end - axis.left, height, Role.TRACK)
        time_s, amount = merged_changes(curve, timeline)
        outline = _outline(time_s, amount, axis, base, (height - 2) / highest)
        yield Path(outline, Role.CURVE, opacity=0.28)
        yield Path(outline[1:-1], Role.CURVE, width=1.1)
        peak = unit.number(curve.peak)
        yield Text(right, middle, peak, _SMALL, Role.MUTED, Anchor.END)


def merged_changes(
    curve: MemoryCurve, timeline: Timeline
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when the amount changes since the timeline's begin, and the amounts.

    Of changes at one instant only the last is kept: what is freed and taken at once
    was never missing. The last amount lasts until the timeline's end.
    """
    time_s = np.append(curve.time_s - timeline.begin_s, timeline.makespan_s)
    time_s = np.clip(time_s, 0.0, timeline.makespan_s)
    amount = np.append(curve.amount, curve.amount[-1:] if curve.amount.size else 0.0)
    same = timeline.makespan_s * 1e-9
    keep = np.append(np.diff(time_s) > same, True)
    return time_s[keep], amount[keep]


def _outline(
    time_s: NDArray[np.float64],
    amount: NDArray[np.float64],
    axis: Axis,
    base: float,
    scale: float,
) -> tuple[Point, ...]:
    """Return the steps of a curve, closed along the base line."""
    points: list[Point] = [(axis.left, base)]
    y = base
    for instant_s, level in zip(time_s.tolist(), amount.tolist(), strict=True):
        x, next_y = axis.x(instant_s), base - level * scale
        points += [(x, y), (x, next_y)]
        y = next_y
    return (*points, (points[-1][0], base))
