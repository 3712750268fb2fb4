"""Rewrite each lane piece by piece, so that a repeating body stays one.

prologue │ body, once │ body, again │ ... │ epilogue
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hocket.core.op import MESSAGES, Op
from hocket.core.schedule import Schedule
from hocket.errors import PlanError


def refuse_messages(schedule: Schedule) -> None:
    """Refuse messages as ops.

    Raises:
        PlanError: there are some.
    """
    if schedule.kinds & MESSAGES:
        raise PlanError("the schedule holds messages already: use drop_messages first")


def rewritten(
    schedule: Schedule, rewrite: Callable[[Sequence[Op]], Iterable[Op]]
) -> Schedule:
    """Return the same schedule with each piece of each lane rewritten.

    Args:
        schedule: any schedule.
        rewrite: returns the new ops of a piece. Pieces that are alike but for the step
            must stay so.
    """
    lanes, body = [], []
    for i, lane in enumerate(schedule.lanes):
        ops: list[Op] = []
        edges = list(_edges(schedule, i))
        now_at = [0]
        for begin, end in pairwise(edges):
            ops += rewrite(lane.ops[begin:end])
            now_at.append(len(ops))
        lanes.append(replace(lane, ops=tuple(ops)))
        if schedule.body:
            body.append((now_at[1], now_at[-2]))
    return replace(schedule, lanes=tuple(lanes), body=tuple(body))


def filtered(schedule: Schedule, stays: Callable[[Op], bool]) -> Schedule:
    """Return the same schedule without the ops that do not stay."""
    return rewritten(schedule, lambda ops: filter(stays, ops))


def _edges(schedule: Schedule, lane: int) -> Iterator[int]:
    """Yield where pieces begin, and where the last one ends."""
    yield 0
    yield from schedule.repetitions(lane)
    yield len(schedule.lanes[lane].ops)
