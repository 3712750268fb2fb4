"""Cut a flush-free order into portions that are played as batches come.

The number of batches is not known beforehand. So the runtime plays the order in
portions of all lanes, and repeats the middle one as long as there are batches:

              prologue              │ body           │ body           │ epilogue
    d0        F0 F0@1 F0@2 B0 U     │ F0@3 B0@1 U@1  │ F0@4 B0@2 U@2  │ B0@3 U@3 ...
    begins    0, 1, 2               │ 3              │ 4              │
    ends      0                     │ 1              │ 2              │ 3, 4

A portion's prologue is the schedule's, with its body once, since the first body begins
with batches that the prologue has read.

The lanes of one device end a portion together, and a device expects the messages that
others send in the portion that it begins. So no lane may need within a portion what
another lane makes in the next one. Where it would, other lanes' bodies begin later:

    d0    |: 0F0 :|  0F0@1 ...                 0F0  |: 0F0@1 :|
    d1    1F0 |: 1F0@1 :|       becomes        1F0  |: 1F0@1 :|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.core.checker.gathers import gather_faults
from hocket.core.dataflow import Value, makes, needs
from hocket.core.gates import Gates, stage_gates, with_gate
from hocket.core.op import Op
from hocket.core.plans.lane_plan import OpPlan, plan_lanes
from hocket.core.schedule import Schedule
from hocket.errors import PlanError, ScheduleError

Ops = tuple[Op, ...]
Plans = tuple[tuple[OpPlan, ...], ...]  # of each lane


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

    Args:
        schedule: one that `align_bodies` returns.

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
        epilogue.append(tuple(op.later(-1) for op in lane.ops[end:]))
    left = [op.step for ops in (*body, *epilogue) for op in ops]
    return Portions(
        tuple(prologue),
        tuple(body),
        tuple(epilogue),
        num_steps,
        num_ended=min(left, default=num_steps),
    )


def plan_portions(
    schedule: Schedule, gates: Gates = ()
) -> tuple[Portions, Plans, Plans, Plans]:
    """Cut an order that has a body, and plan the ops of each lane.

    Args:
        schedule: one that `check` accepts, without explicit messages.
        gates: the stages whose gradients are judged together.

    Raises:
        ScheduleError: a sharded stage would be whole between two portions.

    Returns:
        The portions, and the plans of prologue, body and epilogue. The epilogue follows
        a second repetition of the body there: all its steps are one later.
    """
    aligned = align_bodies(schedule, gates)
    faults = () if aligned is schedule else tuple(x for x, _ in gather_faults(aligned))
    if faults:  # the body begins elsewhere
        raise ScheduleError(faults, str(aligned))
    cut = portions(aligned)
    plans = plan_lanes(aligned.with_num_steps(cut.num_steps + 1), gates)
    lanes = [
        (plan, len(first), len(first) + len(body))
        for plan, first, body in zip(plans, cut.prologue, cut.body, strict=True)
    ]
    return (
        cut,
        tuple(plan[:begin] for plan, begin, _ in lanes),
        tuple(plan[begin:end] for plan, begin, end in lanes),
        tuple(plan[end:] for plan, _, end in lanes),
    )


def align_bodies(schedule: Schedule, gates: Gates = ()) -> Schedule:
    """Let bodies begin later where a lane needs what another makes in a later portion.

    Args:
        schedule: one that `check` accepts. Returned as it is if it has no body, or if
            no lane needs such.
        gates: the stages whose gradients are judged together: an update waits for the
            gradients of its gate, too.

    Returns:
        The same order, for more steps if bodies begin later.
    """
    if not schedule.body:
        return schedule
    num_repeats = 4
    while True:
        num_steps = schedule.program.num_steps - schedule.num_repeats + num_repeats
        wide = schedule.with_num_steps(num_steps)
        lengths = [(end - begin) // num_repeats for begin, end in wide.body]
        first = [begin + n for (begin, _), n in zip(wide.body, lengths, strict=True)]
        played = _played_before(wide, first, gates)
        later = [max(0, n - count) for n, count in zip(played, first, strict=True)]
        if not any(later):
            return schedule
        bodies = max(-(-n // max(1, m)) for n, m in zip(later, lengths, strict=True))
        if bodies < num_repeats - 1:
            break
        num_repeats *= 2
    left = num_repeats - bodies
    body = tuple(
        (begin + more, begin + more + left * length)
        for (begin, _), more, length in zip(wide.body, later, lengths, strict=True)
    )
    return Schedule(wide.program, wide.lanes, body, left)


def _played_before(
    schedule: Schedule, counts: Sequence[int], gates: Gates
) -> list[int]:
    """Count the ops of each lane that must be played for the first ops of all lanes.

    Args:
        schedule: the order.
        counts: the number of first ops of each lane.
        gates: the stages whose gradients each update waits for.
    """
    program = schedule.program
    gate_of = stage_gates(gates)
    made: dict[Value, tuple[int, int]] = {
        value: (number, position)
        for number, lane in enumerate(schedule.lanes)
        for position, op in enumerate(lane.ops)
        for value in makes(op, program)
    }
    played = [0] * len(schedule.lanes)
    due = [(number, count - 1) for number, count in enumerate(counts)]
    while due:
        number, position = due.pop()
        begin = played[number]
        played[number] = max(begin, position + 1)
        for op in schedule.lanes[number].ops[begin : position + 1]:
            for one in with_gate(op, gate_of):
                due += [made[value] for value in needs(one, program) if value in made]
    return played
