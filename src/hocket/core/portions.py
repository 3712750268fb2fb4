"""Cut a flush-free order into portions that are played as batches come.

The number of batches is not known beforehand. So the runtime plays the order in
portions of all lanes, and repeats the middle one as long as there are batches:

              prologue              │ body           │ body           │ epilogue
    d0        F0 F0@1 F0@2 B0 U     │ F0@3 B0@1 U@1  │ F0@4 B0@2 U@2  │ B0@3 U@3 ...
    begins    0, 1, 2               │ 3              │ 4              │
    ends      0                     │ 1              │ 2              │ 3, 4

A portion's prologue is the schedule's, with its body once, since the first body begins
with batches that the prologue has read.
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
        prologue: each lane's prologue and its body once; steps count from 0.
        body: each lane's body once more, as it follows the prologue. In the next
            repetition all steps are one later.
        epilogue: each lane's epilogue, as it follows the prologue. Behind a repetition
            of the body all its steps are one later.
        num_steps: the steps of prologue and epilogue: the fewest batches it takes.
        num_ended: the steps that all lanes have ended when the prologue ends.
    """

    prologue: tuple[Ops, ...]
    body: tuple[Ops, ...]
    epilogue: tuple[Ops, ...]
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
    prologue, body, epilogue = [], [], []
    for lane, (begin, end) in zip(twice.lanes, twice.body, strict=True):
        middle = begin + (end - begin) // 2
        prologue.append(lane.ops[:middle])
        body.append(lane.ops[middle:end])
        epilogue.append(tuple(replace(op, step=op.step - 1) for op in lane.ops[end:]))
    left = [op.step for ops in (*body, *epilogue) for op in ops]
    return Portions(
        tuple(prologue),
        tuple(body),
        tuple(epilogue),
        num_steps,
        num_ended=min(left, default=num_steps),
    )
