"""An order without flushes, cut into what is played when the next batch is there.

Nobody knows beforehand how many batches will come. So the order is played in portions,
each of all lanes, of which the middle one is repeated as long as there are batches:

              opening               │ again          │ again          │ closing
    d0        F0 F0@1 F0@2 B0 U     │ F0@3 B0@1 U@1  │ F0@4 B0@2 U@2  │ B0@3 U@3 ...
    begins    0, 1, 2               │ 3              │ 4              │
    ends      0                     │ 1              │ 2              │ 3, 4

The opening is the prologue with the body once; the closing is the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hocket.core.op import Op
from hocket.core.schedule import Schedule
from hocket.errors import PlanError

Ops = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Portions:
    """What each lane plays, portion by portion.

    Args:
        opening: of each lane, the prologue and the body once; steps count from 0.
        again: the body once more, as it stands behind the opening. Behind another
            `again`, all steps are one later.
        closing: the epilogue, as it stands behind the opening; likewise.
        num_steps: that opening and closing have together: so many batches it takes.
        num_ended: steps that are over in all lanes when the opening is.
    """

    opening: tuple[Ops, ...]
    again: tuple[Ops, ...]
    closing: tuple[Ops, ...]
    num_steps: int
    num_ended: int


def portions(schedule: Schedule) -> Portions:
    """Cut an order that has a body.

    Raises:
        PlanError: it has none.
    """
    if not schedule.body:
        raise PlanError(
            "an order without a repeating body has no portions: each of its steps ends "
            "before the next begins"
        )
    num_steps = schedule.program.num_steps - schedule.num_repeats + 1
    twice = schedule.with_num_steps(num_steps + 1)
    opening, again, closing = [], [], []
    for lane, (begin, end) in zip(twice.lanes, twice.body, strict=True):
        middle = begin + (end - begin) // 2
        opening.append(lane.ops[:middle])
        again.append(lane.ops[middle:end])
        closing.append(tuple(replace(op, step=op.step - 1) for op in lane.ops[end:]))
    left = [op.step for ops in (*again, *closing) for op in ops]
    return Portions(
        tuple(opening),
        tuple(again),
        tuple(closing),
        num_steps,
        num_ended=min(left, default=num_steps),
    )
