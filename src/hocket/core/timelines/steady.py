"""Find when a pipeline is full: its steady bubble is measured then.

    d0  F F F . . B F B F B F B . B . B      one step of a synchronous order
    d1  . F F . B F B F B F B F B . B .
    d2  . . F B F B F B F B F B F B . .
                  └─────────┘
    from when every lane has begun its first backward (and, where a lane has none, its
    first forward) until one lane has ended its last forward

Of a flush-free order it is the later half of the body's repetitions on each lane, from
start to start: from three repetitions on neither filling nor draining reaches into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hocket.core.op import BACKWARDS, Kind
from hocket.core.schedule import Lane, Schedule
from hocket.core.timelines.arrays import Floats

Window: TypeAlias = tuple[float, float]  # begin_s, end_s


def steady_windows(
    schedule: Schedule, start_s: Sequence[Floats], end_s: Sequence[Floats]
) -> list[list[Window]]:
    """Return, by lane, the windows in which the pipeline is full.

    Args:
        schedule: what was done.
        start_s: the start of each op of each lane.
        end_s: the end of each op of each lane.

    Returns:
        The same number of windows for each lane; nothing if there is no steady state.
    """
    if schedule.body:
        windows = [
            _body_window(schedule, lane, start_s[lane], end_s[lane])
            for lane in range(len(schedule.lanes))
        ]
        is_empty = all(begin >= end for begin, end in windows)
        return [] if is_empty else [[window] for window in windows]
    full = _full_windows(schedule, start_s, end_s)
    return [full] * len(schedule.lanes) if full else []


def num_repeats_in_window(schedule: Schedule) -> int:
    """Return how often the body repeats from a window's begin to its end, or 0."""
    if not schedule.body or all(begin == end for begin, end in schedule.body):
        return 0
    last = schedule.num_repeats - 1
    return max(1, last - last // 2)


def _body_window(
    schedule: Schedule, lane: int, start_s: Floats, end_s: Floats
) -> Window:
    begin, end = schedule.body[lane]
    if begin == end:
        return 0.0, 0.0
    num_repeats = schedule.num_repeats
    length = (end - begin) // num_repeats
    first = begin + length * ((num_repeats - 1) // 2)
    if num_repeats > 1:
        return float(start_s[first]), float(start_s[end - length])
    after = start_s[end] if end < len(start_s) else end_s[end - 1]
    return float(start_s[first]), float(after)


def _full_windows(
    schedule: Schedule, start_s: Sequence[Floats], end_s: Sequence[Floats]
) -> list[Window]:
    """Return one window per step in which all lanes are full."""
    num_steps = schedule.program.num_steps
    begins, ends = [float("-inf")] * num_steps, [float("inf")] * num_steps
    for lane, starts, stops in zip(schedule.lanes, start_s, end_s, strict=True):
        first, last = _first_and_last(lane)
        for step, position in first.items():
            begins[step] = max(begins[step], float(starts[position]))
        for step, position in last.items():
            ends[step] = min(ends[step], float(stops[position]))
    return [
        (begin, end)
        for begin, end in zip(begins, ends, strict=True)
        if float("-inf") < begin < end < float("inf")
    ]


def _first_and_last(lane: Lane) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by step, the places of a lane's first backward and last forward."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, op in enumerate(lane.ops):
        if op.kind is Kind.FORWARD:
            forward.setdefault(op.step, position)
            last[op.step] = position
        elif op.kind in BACKWARDS:
            backward.setdefault(op.step, position)
    return forward | backward, last
