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

from hocket.core.op import MESSAGES, Kind
from hocket.core.timelines.timeline import Timeline
from hocket.draw.lanes import lane_labels, lane_shapes, transfer_shapes
from hocket.draw.memory import memory_shapes
from hocket.draw.palette import KIND_NAMES, paler_note
from hocket.draw.quantity import percent, seconds, ticks, time_unit
from hocket.draw.scene import Anchor, AreaFill, Box, Path, Role, Scene, Shape, Text
from hocket.draw.summary import summarize
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


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a time lies on the page.

    Args:
        left: the place of time 0.
        right: the place of the latest end.
        longest_s: the latest end of all panels.
    """

    left: float
    right: float
    longest_s: float

    def x(self, time_s: float) -> float:
        """Return the place of a time, counted from the timeline's begin."""
        share = time_s / self.longest_s if self.longest_s > 0 else 0.0
        return self.left + (self.right - self.left) * share


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
    labels = [label for _, timeline in panels for label in lane_labels(timeline)]
    left = MARGIN + 10 + 7 * max(map(len, labels), default=0)
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
        numbers = summarize(self.timeline)
        facts = (
            f"{seconds(numbers.makespan_s)}, bubble {percent(numbers.bubble)}, "
            f"steady {percent(numbers.steady_bubble)}"
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
