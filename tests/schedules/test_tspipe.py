"""TSPipe's slots as published, and its times in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest

from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.passes.fill_with import fill_with
from hocket.schedules import Shape, make_schedule
from hocket.schedules.tspipe import tspipe
from tests.passes.support.teachers import equal_costs, with_teacher

# Four devices, two views of three microbatches. t: the teacher of the next batch, S and
# B: the student, O: the updates. A slot of S is of two forwards here.
PUBLISHED = """
SSSSSS tttttt BBBBBBBBBBBB O
SSSSSS tttt BBBBBBBBBBBB tt O
SSSSSS tt BBBBBBBBBBBB tttt O
SSSSSS BBBBBBBBBBBB tttttt O
"""


def order(p: int, m: int, num_steps: int) -> Schedule:
    """Tspipe's order."""
    return tspipe(Shape(p, m, stages_per_device=2, num_steps=num_steps))


def slots(schedule: Schedule, lane: int) -> Iterator[str]:
    """What a device does in a step, as the figure names it."""
    begin, end = schedule.body[lane]
    ops = schedule.lanes[lane].ops[begin:end]
    for name, group in groupby(ops, lambda op: _slot(op, schedule)):
        length = len(list(group))
        yield name * (length // 2 if name in "SO" else length)


def _slot(op: Op, schedule: Schedule) -> str:
    if op.kind is Kind.LOSS:
        return ""  # between two slots
    if op.kind is Kind.FORWARD:
        return "S" if schedule.program.stages[op.stage].trainable else "t"
    return "O" if op.kind is Kind.UPDATE else "B"


def test_slots_are_those_of_the_paper() -> None:
    """A loss of no length stands before the last device's backwards."""
    schedule = order(4, 12, 2)
    lines = [" ".join(filter(None, slots(schedule, lane))) for lane in range(4)]
    assert lines == PUBLISHED.split("\n")[1:-1]


def step_s(schedule: Schedule, costs: Costs) -> float:
    """How long a step takes in a long run."""
    num_steps = schedule.program.num_devices + 1
    ends_s = [
        simulate(schedule.with_num_steps(n), costs).makespan_s
        for n in (num_steps, num_steps + 8)
    ]
    return (ends_s[1] - ends_s[0]) / 8


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_published_numbers_leave_no_bubble(p: int) -> None:
    """`8 M + 1` slots a step, all of them work; GPipe needs 1.375 times as many.

    A slot is a forward of the teacher, or two of the student, or a backward of one
    microbatch: `B = 2 F`.
    """
    m, slot_s = 4 * (p - 1), 1.0
    teacher = StageCost(forward_s=slot_s)
    student = StageCost(slot_s / 2, slot_s / 2, slot_s / 2, update_s=slot_s)
    costs = Costs((*[teacher] * p, *[student] * p))
    assert step_s(order(p, m, 2), costs) == pytest.approx((8 * (p - 1) + 1) * slot_s)

    # GPipe, whose microbatches are of a slot: the teacher's forwards, then the student.
    base = make_schedule("gpipe", num_devices=p, num_microbatches=m // 2)
    program = with_teacher(base.program, m // 2, delay=0)
    equal = equal_costs(program, slot_s, StageCost(slot_s, slot_s, slot_s))
    gpipe_s = simulate(fill_with(base, program, costs=equal), equal).makespan_s
    assert gpipe_s / (8 * (p - 1) * slot_s) == pytest.approx(1.375)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_the_updates_go_down_the_pipeline_one_slot_apart(p: int) -> None:
    """Device 0 has no forwards of the teacher left behind its backwards."""
    m = 4 * (p - 1)
    student = StageCost(0.5, 0.5, 0.5, update_s=1.0)
    costs = Costs((*[StageCost(forward_s=1.0)] * p, *[student] * p))
    schedule = order(p, m, 4)
    timeline = simulate(schedule, costs)
    starts = {
        span.op.stage - p: span.start_s
        for span in timeline.spans
        if span.op == Op(Kind.UPDATE, span.op.stage, None, 2) and span.op.stage >= p
    }
    assert [starts[d] for d in range(p)] == sorted(starts.values())


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(2, 4, 1), "got stages_per_device=1: use 2"),
        (Shape(2, 5, 2), "got num_microbatches=5: use 6 or 4"),
        (Shape(2, 1, 2), "got num_microbatches=1: use 2"),
    ],
)
def test_refuses_other_shapes(shape: Shape, reason: str) -> None:
    """Names the numbers that would work."""
    with pytest.raises(ShapeError, match=reason):
        tspipe(shape)
