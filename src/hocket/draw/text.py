"""Draw timelines as text: lanes as rows on a common time axis.

    d0  F0 F1 ...... B0--- B1---   25 %     2
    d1  ...F0 B0--- F1 B1--- ...   25 %     1
        0  1  2  3  4  5  6  7 s

A letter and a number are an op and its microbatch, dashes continue it, points are the
bubble. Where all times are whole multiples of one length, the columns are exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hocket.core.op import ASYNCHRONOUS, SHARDING, Kind, Op
from hocket.core.timelines.timeline import Timeline
from hocket.draw.palette import KIND_NAMES, Theme, channels, fill, stage_tones, text_on
from hocket.draw.quantity import percent, seconds, short, ticks, time_unit
from hocket.draw.summary import peak_microbatches, step_ends


def to_text(
    timeline: Timeline, *, width: int = 100, colour: Theme | None = None
) -> str:
    """Draw a timeline in columns of text.

    Args:
        timeline: what to draw. Messages and reductions, which run beside their lane,
            are left out.
        width: the most columns to use, 60 or more.
        colour: ANSI colours for a light or a dark terminal; none by default.
    """
    peaks = peak_microbatches(timeline)
    lanes = timeline.schedule.lanes
    before = max(len(lane.label) for lane in lanes) + 2
    columns = _Columns.fitting(timeline, max(10, width - before - len(_HEADS)))
    painter = _Painter(timeline, columns, colour)
    lines = [f"{'':{before}}{_step_marks(timeline, columns)}{_HEADS}"]
    for i, lane in enumerate(lanes):
        bubble = percent(timeline.lane_bubble_fraction(i))
        peak = short(peaks[lane.device])
        row = "".join(painter.row(i))
        lines.append(f"{lane.label:<{before}}{row}{bubble:>9}{peak:>6}")
    lines.append(f"{'':{before}}{_ruler(timeline, columns)}")
    lines.append(
        f"makespan {seconds(timeline.makespan_s)}, bubble "
        f"{percent(timeline.bubble_fraction)}, steady "
        f"{percent(timeline.steady_bubble_fraction)}"
    )
    return "\n".join(line.rstrip() for line in lines)


def legend(timelines: Iterable[Timeline]) -> str:
    """Return what the letters and numbers of pictures in text are, in one line."""
    there = {op.kind for x in timelines for lane in x.schedule.lanes for op in lane.ops}
    shown = [kind for kind in Kind if kind in there - ASYNCHRONOUS - SHARDING]
    letters = ", ".join(f"{kind.value} {KIND_NAMES[kind]}" for kind in shown)
    return (
        f"{letters}; F0 is of microbatch 0, 2F0 of stage 2; a point: nothing to do; "
        "peak: microbatches held at most; makespan: from begin to end; "
        "steady: the bubble without warm-up and drain"
    )


_HEADS = "   bubble  peak"

# The shortest op gets no more columns than this when there is room to spare.
_MOST_PER_OP = 6


@dataclass(frozen=True, slots=True)
class _Columns:
    """How time is cut into columns."""

    count: int
    per_s: float

    @classmethod
    def fitting(cls, timeline: Timeline, most: int) -> _Columns:
        """Choose whole columns per common divisor of all times, if there is one."""
        if timeline.makespan_s <= 0:
            return cls(most, 0.0)
        moments = np.concatenate([*timeline.start_s, *timeline.end_s])
        share = np.unique((moments - timeline.begin_s) / timeline.makespan_s)
        gaps = np.diff(share)
        least = float(gaps[gaps > 1e-9].min(initial=1.0))
        num_lengths = round(1 / least)
        errors = np.abs(share * num_lengths - np.round(share * num_lengths))
        if errors.max() < 1e-4 and num_lengths <= most:
            count = num_lengths * min(_MOST_PER_OP, most // num_lengths)
            return cls(count, count / timeline.makespan_s)
        return cls(most, most / timeline.makespan_s)

    def at(self, time_s: float) -> int:
        """Return the column of a time, counted from the timeline's begin."""
        return round(time_s * self.per_s)


@dataclass
class _Painter:
    """Writes the rows of one timeline."""

    timeline: Timeline
    columns: _Columns
    colour: Theme | None

    def __post_init__(self) -> None:
        program = self.timeline.schedule.program
        self.tones = stage_tones(program)
        several = any(len(stages) > 1 for stages in program.stages_on)
        self.names_stages = several and self._shortest_columns() >= len("0F0")

    def row(self, lane: int) -> Iterator[str]:
        """Yield one lane: its ops as text, and points between them."""
        owners = self._owners(lane)
        column = 0
        while column < len(owners):
            begin, op = column, owners[column]
            while column < len(owners) and owners[column] is op:
                column += 1
            yield self._cell(op, column - begin)

    def _shortest_columns(self) -> float:
        """Return how many columns the shortest op has that takes any time."""
        starts, ends = self.timeline.start_s, self.timeline.end_s
        lengths_s = np.concatenate(ends) - np.concatenate(starts)
        shortest_s = lengths_s[lengths_s > 0].min(initial=self.timeline.makespan_s)
        return float(shortest_s) * self.columns.per_s

    def _owners(self, lane: int) -> list[Op | None]:
        """Return the op that each column shows; None for the bubble.

        A column of several shorter ops shows the longest of them, if together they
        work for at least half of it.
        """
        owners: list[Op | None] = [None] * self.columns.count
        crowds: dict[int, list[tuple[float, Op]]] = defaultdict(list)
        starts = (self.timeline.start_s[lane] - self.timeline.begin_s).tolist()
        ends = (self.timeline.end_s[lane] - self.timeline.begin_s).tolist()
        ops = self.timeline.schedule.lanes[lane].ops
        for op, start_s, end_s in zip(ops, starts, ends, strict=True):
            begin, end = self.columns.at(start_s), self.columns.at(end_s)
            if op.kind in ASYNCHRONOUS or end_s <= start_s:
                continue
            if begin < end:
                owners[begin:end] = [op] * (end - begin)
            else:
                crowds[min(begin, self.columns.count - 1)].append((end_s - start_s, op))
        for column, crowd in crowds.items():
            work_s = sum(duration_s for duration_s, _ in crowd)
            if owners[column] is None and work_s * self.columns.per_s >= 0.5:
                owners[column] = max(crowd, key=lambda member: member[0])[1]
        return owners

    def _cell(self, op: Op | None, width: int) -> str:
        if op is None:
            return "." * width
        names = [op.kind.value]
        if op.microbatch is not None:
            names.insert(0, f"{op.kind.value}{op.microbatch}")
        if self.names_stages:
            names.insert(0, str(op).split("@", 1)[0])
        name = next((name for name in names if len(name) <= width), "")
        if self.colour is not None:
            paper = fill(op.kind, self.tones[op.stage], self.colour)
            return _painted(f"{name:<{width}}", paper)
        return f"{name:-<{width - 1}} "[:width] if len(name) < width else name


def _painted(text: str, paper: str) -> str:
    """Write text on a colour, for terminals of 24 bits."""
    ink, ground = (";".join(map(str, channels(c))) for c in (text_on(paper), paper))
    return f"\x1b[38;2;{ink};48;2;{ground}m{text}\x1b[0m"


def _step_marks(timeline: Timeline, columns: _Columns) -> str:
    """Write where the first lane begins each step; blank for one step."""
    begins = [timeline.begin_s, *step_ends(timeline)[0][:-1].tolist()]
    if len(begins) == 1:
        return " " * columns.count
    marks = [
        (columns.at(begin_s - timeline.begin_s), f"step {step}")
        for step, begin_s in enumerate(begins)
    ]
    return _written(marks, columns.count)


def _ruler(timeline: Timeline, columns: _Columns) -> str:
    unit = time_unit(timeline.makespan_s)
    numbers = ticks(timeline.makespan_s / unit.size, max(1, columns.count // 10))
    marks = [(columns.at(number * unit.size), f"{number:g}") for number in numbers]
    last, text = marks.pop()
    return _written([*marks, (last, f"{text} {unit.name}")], columns.count + 8)


def _written(marks: list[tuple[int, str]], width: int) -> str:
    """Write texts at their columns; leave out those that touch the one before."""
    line = ""
    for column, text in marks:
        if column >= len(line) + (1 if line else 0) and column + len(text) <= width:
            line = f"{line:<{column}}{text}"
    return f"{line:<{width}}"
