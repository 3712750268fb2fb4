"""Write timelines as the columns of numbers that the page's script draws.

Times are whole ticks, so that 20,000 spans make a page of well under a megabyte: a
span is the gap since the span before it on its lane, and its duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.core.op import ASYNCHRONOUS, MESSAGES, Kind
from hocket.core.timelines.causality import CriticalPath
from hocket.core.timelines.idle import Cause, Wait
from hocket.core.timelines.timeline import Timeline
from hocket.draw.flows import flows
from hocket.draw.html.content import Chart
from hocket.draw.layout import Titled, memory_title, merged_changes
from hocket.draw.palette import (
    KIND_NAMES,
    SURFACES,
    Theme,
    fill,
    paler_note,
    stage_tones,
    text_on,
)
from hocket.draw.summary import knows_bytes, memory_curves, step_ends
from hocket.draw.where import Where

_KINDS = tuple(Kind)
_CAUSES = tuple(Cause)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_Columns = dict[str, Any]


def page_data(
    timelines: Sequence[Titled], wheres: Sequence[Where], charts: Sequence[Chart]
) -> _Columns:
    """Return all that the script needs, as plain lists, numbers and strings.

    Args:
        timelines: with their titles.
        wheres: where the time of each went.
        charts: quantities over steps.
    """
    tones = sorted(
        {t for _, line in timelines for t in stage_tones(line.schedule.program)}
    )
    return {
        "kinds": [
            {
                "letter": kind.value,
                "name": KIND_NAMES[kind],
                "beside": kind in ASYNCHRONOUS,
                "message": kind in MESSAGES,
            }
            for kind in _KINDS
        ],
        "paler": paler_note(line.schedule.program for _, line in timelines),
        "fills": {theme.value: _fills(tones, theme) for theme in Theme},
        "causes": [cause.value for cause in _CAUSES],
        "panels": [
            _panel(title, line, where, tones)
            for (title, line), where in zip(timelines, wheres, strict=True)
        ],
        "charts": [_chart(chart) for chart in charts],
    }


def surface_variables(theme: Theme) -> str:
    """Return the colours of everything that is not an op, as CSS variables."""
    return "".join(f"--{name}:{colour};" for name, colour in SURFACES[theme].items())


def _fills(tones: Sequence[float], theme: Theme) -> list[list[list[str]]]:
    """Return, for each tone and kind, the colour and the colour of text on it."""
    return [
        [[fill(kind, tone, theme), text_on(fill(kind, tone, theme))] for kind in _KINDS]
        for tone in tones
    ]


def _panel(
    title: str, timeline: Timeline, where: Where, tones: Sequence[float]
) -> _Columns:
    program = timeline.schedule.program
    clock = _Clock(timeline)
    ends = step_ends(timeline)
    return {
        "title": title or timeline.origin.value,
        "origin": timeline.origin.value,
        "tick": clock.tick_s,
        "makespan": clock.ticks(timeline.begin_s + timeline.makespan_s),
        "nets": [stage.net for stage in program.stages]
        if len(program.nets) > 1
        else [],
        "tones": [tones.index(tone) for tone in stage_tones(program)],
        "lanes": [
            _lane(timeline, i, where.idle.waits[i], clock) for i in range(len(ends))
        ],
        "path": _path(where.path, clock),
        "steps": [_gaps(clock.array(lane_ends)) for lane_ends in ends],
        "transfers": _transfers(timeline, clock),
        "memory": _memory(timeline, clock),
    }


class _Clock:
    """Times as whole ticks since the timeline's begin."""

    def __init__(self, timeline: Timeline) -> None:
        makespan_s = timeline.makespan_s
        self.begin_s = timeline.begin_s
        self.tick_s = 10.0 ** (floor(log10(makespan_s)) - 7) if makespan_s > 0 else 1.0

    def ticks(self, time_s: float) -> int:
        return round((time_s - self.begin_s) / self.tick_s)

    def array(self, time_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.rint((time_s - self.begin_s) / self.tick_s).astype(np.int64)


def _gaps(ticks: NDArray[np.int64]) -> list[int]:
    """Return each number minus the one before it."""
    gaps: list[int] = np.diff(ticks, prepend=0).tolist()
    return gaps


def _lane(
    timeline: Timeline, index: int, waits: Sequence[Wait], clock: _Clock
) -> _Columns:
    lane = timeline.schedule.lanes[index]
    starts = clock.array(timeline.start_s[index])
    ends = clock.array(timeline.end_s[index])
    before = np.concatenate(([0], ends[:-1]))
    return {
        "label": lane.label,
        "device": lane.device,
        "bubble": round(timeline.lane_bubble_fraction(index), 6),
        "kind": [_CODES[op.kind] for op in lane.ops],
        "stage": [op.stage for op in lane.ops],
        "microbatch": [
            -1 if op.microbatch is None else op.microbatch for op in lane.ops
        ],
        "step": _gaps(np.array([op.step for op in lane.ops], np.int64)),
        "gap": (starts - before).tolist(),
        "duration": (ends - starts).tolist(),
        "waits": _waits(waits, clock),
    }


def _waits(waits: Sequence[Wait], clock: _Clock) -> _Columns:
    """Return a lane's idle time; lanes and devices that are not there are -1."""
    starts = clock.array(np.array([wait.start_s for wait in waits]))
    ends = clock.array(np.array([wait.end_s for wait in waits]))
    before = np.concatenate(([0], ends[:-1])) if waits else ends
    return {
        "gap": (starts - before).tolist(),
        "duration": (ends - starts).tolist(),
        "cause": [_CAUSES.index(wait.cause) for wait in waits],
        "on": [-1 if wait.lane is None else wait.lane for wait in waits],
        "to": [-1 if wait.to_device is None else wait.to_device for wait in waits],
    }


def _path(path: CriticalPath, clock: _Clock) -> _Columns:
    """Return the segments of the critical path, which follow each other."""
    segments = path.segments
    ends = clock.array(np.array([segment.end_s for segment in segments]))
    begin = clock.ticks(segments[0].start_s) if segments else 0
    return {
        "begin": begin,
        "duration": np.diff(ends, prepend=begin).tolist(),
        "part": [segment.part.value for segment in segments],
        "lane": [segment.lane for segment in segments],
        "to": [-1 if x.to_device is None else x.to_device for x in segments],
    }


def _transfers(timeline: Timeline, clock: _Clock) -> _Columns:
    """Return the messages that ops read: `lane, position` of both ends of each."""
    found = list(flows(timeline))
    rows = np.array([flow.transfer for flow in found], np.int64)
    traffic = timeline.traffic
    return {
        "maker": [number for flow in found for number in flow.maker],
        "reader": [number for flow in found for number in flow.reader],
        "start": clock.array(traffic.start_s[rows]).tolist(),
        "end": clock.array(traffic.end_s[rows]).tolist(),
        "bytes": traffic.num_bytes[rows].tolist(),
    }


def _memory(timeline: Timeline, clock: _Clock) -> _Columns:
    curves = []
    for curve in memory_curves(timeline):
        time_s, amount = merged_changes(curve, timeline)
        times = clock.array(time_s + timeline.begin_s)
        rounded = np.round(amount, 4).tolist()
        curves.append(
            {
                "peak": round(curve.peak, 4),
                "time": _gaps(times),
                # Whole numbers without a point: bytes mostly are.
                "amount": [int(a) if a == int(a) else a for a in rounded],
            }
        )
    return {
        "title": "memory" if knows_bytes(timeline) else memory_title(timeline),
        "isBytes": knows_bytes(timeline),
        "curves": curves,
    }


def _chart(chart: Chart) -> _Columns:
    return {
        "title": chart.title,
        "lines": [
            {
                "name": line.name,
                "steps": list(line.steps),
                "values": line.finite_values(),
                "isEvaluation": line.is_evaluation,
            }
            for line in chart.lines
        ],
    }
