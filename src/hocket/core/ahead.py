"""Which forwards a step can do before its weights are certain.

An update that does not wait for the norm of all gradients may have to be undone in the
next step, and so must be what was computed from it. Until then a lane does only what is
easily done again:

    d0  0F0 0F1 0F2 │ 0B0 ...      nothing but forwards,
    d1  1F0 1F1 │ 1B0 ...          whose inputs are of the same kind,
    d2  │ 2F0 2B0 ...              and none that makes a loss, which people see
"""

from __future__ import annotations

from dataclasses import replace

from hocket.core.op import Kind
from hocket.core.schedule import Lane, Schedule


def lanes_ahead(schedule: Schedule) -> tuple[Lane, ...]:
    """The begin of each lane, as far as it is such forwards.

    What one of them needs is made by another one: so where all lanes throw them away
    and begin anew, no message is missed and none is left over.

    >>> from hocket.schedules import make_schedule
    >>> schedule = make_schedule("1f1b", num_devices=3, num_microbatches=4)
    >>> for lane in lanes_ahead(schedule):
    ...     print(lane.label, *lane.ops)
    d0 0F0 0F1 0F2
    d1 1F0 1F1
    d2

    Args:
        schedule: of one step.
    """
    lanes = tuple(_forwards(schedule, lane) for lane in schedule.lanes)
    while True:
        made = {(op.stage, op.microbatch) for lane in lanes for op in lane.ops}
        fed = tuple(_fed(schedule, lane, made) for lane in lanes)
        if fed == lanes:
            return lanes
        lanes = fed


def _forwards(schedule: Schedule, lane: Lane) -> Lane:
    """Up to the first op that is no forward, or makes a loss."""
    targets = schedule.program.targets
    for i, op in enumerate(lane.ops):
        if op.kind is not Kind.FORWARD or not targets[op.stage]:
            return replace(lane, ops=lane.ops[:i])
    return lane


def _fed(schedule: Schedule, lane: Lane, made: set[tuple[int, int | None]]) -> Lane:
    """Up to the first forward whose input is not among those made."""
    sources = schedule.program.sources
    for i, op in enumerate(lane.ops):
        if any((source, op.microbatch) not in made for source in sources[op.stage]):
            return replace(lane, ops=lane.ops[:i])
    return lane
