"""The times of filled orders, in closed form.

Of `m` microbatches on `p` devices, with forwards of `f_s`, backwards of `b`, and a
teacher whose forwards take `f_t` for each of the student's microbatches, a step takes

    naive, one device at a time            p m (f_t + f_s + b)
    the teacher first, then the student    m (f_t + f_s + b) + (p - 1) (f + b)
    the teacher one batch ahead            m (f_t + f_s + b) + what it cannot fill,
                                           max(0, (p - 1) (f_s + b) - m f_t)

where `f` is the greater of `f_t` and `f_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.passes.fill_with import fill_with
from hocket.schedules import make_schedule
from tests.passes.support.teachers import equal_costs, with_teacher

EQUAL: Final = StageCost(1.0, 1.0, 1.0)
LARGE: Final = pytest.param(16, marks=pytest.mark.long)


def step_s(
    base: Schedule,
    num_forwards: int,
    forward_s: float,
    *,
    delay: int = 1,
    student: StageCost = EQUAL,
) -> float:
    """How long a step takes in a long run of a filled order.

    Args:
        base: the student's order.
        num_forwards: the teacher's microbatches.
        forward_s: a forward of one of these.
        delay: the teacher's.
        student: the costs of the student.
    """
    num_devices = base.program.num_devices
    makespans_s = []
    for num_steps in (num_devices + 1, num_devices + 5):
        program = with_teacher(
            base.program, num_forwards, delay=delay, num_steps=num_steps
        )
        costs = equal_costs(program, forward_s, student)
        order = fill_with(base, program, costs=costs)
        makespans_s.append(simulate(order, costs).makespan_s)
    return (makespans_s[1] - makespans_s[0]) / 4


def order(name: str, p: int, m: int) -> Schedule:
    """A student's order."""
    return make_schedule(name, num_devices=p, num_microbatches=m)


def sizes(
    p: int, *, teachers_s: Sequence[float], quick_s: Sequence[float]
) -> list[Any]:
    """Numbers of devices, with times of the teacher; the long ones are marked.

    Args:
        p: of these and of more devices, orders take long to fill.
        teachers_s: with fewer devices, and in long tests.
        quick_s: with `p` devices.
    """
    return [
        pytest.param(
            num,
            teacher_s,
            marks=[pytest.mark.long] if num > p or teacher_s not in quick else [],
        )
        for num, quick in ((2, teachers_s), (4, teachers_s), (p, quick_s), (2 * p, ()))
        for teacher_s in teachers_s
    ]


def formula_s(p: int, m: int, teacher_s: float) -> float:
    """A step with the teacher ahead; the student's times are all 1."""
    return m * (teacher_s + 3.0) + max(0.0, (p - 1) * 3.0 - m * teacher_s)


@pytest.mark.parametrize(
    ("p", "teacher_s"), sizes(8, teachers_s=(0.5, 1.0, 2.0, 4.0), quick_s=(1.0, 4.0))
)
def test_gpipe_takes_the_work_and_what_the_teacher_cannot_fill(
    p: int, teacher_s: float
) -> None:
    """With forwards of the teacher that are not longer than the student's."""
    num_parts = max(1, int(teacher_s))
    for m in {p - 1, p, 2 * p} if p < 16 else {p - 1}:
        found_s = step_s(order("gpipe", p, m), m * num_parts, teacher_s / num_parts)
        assert found_s == pytest.approx(formula_s(p, m, teacher_s), abs=1e-9)


@pytest.mark.parametrize(
    ("p", "teacher_s"), sizes(8, teachers_s=(0.5, 1.0, 2.0), quick_s=(1.0,))
)
def test_1f1b_takes_as_long_with_finer_forwards(p: int, teacher_s: float) -> None:
    """Its waits are shorter, so that forwards fit them that are half as long."""
    num_parts = int(2 * teacher_s)
    for m in {p, 2 * p} if p < 16 else {p}:
        found_s = step_s(order("1f1b", p, m), m * num_parts, teacher_s / num_parts)
        assert found_s == pytest.approx(formula_s(p, m, teacher_s), abs=1e-9)


@pytest.mark.parametrize("p", [4, 8])
def test_longer_forwards_leave_gaps_that_shorter_ones_fill(p: int) -> None:
    """Four times as long as the student's: waves through the pipeline differ."""
    m = p - 1
    coarse_s = step_s(order("gpipe", p, m), m, 4.0)
    fine_s = step_s(order("gpipe", p, m), 4 * m, 1.0)
    assert fine_s == pytest.approx(formula_s(p, m, 4.0))
    assert coarse_s > 1.3 * fine_s


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("teacher_s", [0.5, 1.0, 2.0])
def test_without_delay_both_nets_are_one_pipeline(p: int, teacher_s: float) -> None:
    """The same step's teacher waits for the update, and the student's loss for it.

    GPipe, the teacher first: `m (f_t + f_s + b) + (p - 1) (f + b)`.
    """
    m = 2 * p
    expected_s = m * (teacher_s + 3.0) + (p - 1) * (max(teacher_s, 1.0) + 2.0)
    found_s = step_s(order("gpipe", p, m), m, teacher_s, delay=0)
    assert found_s == pytest.approx(expected_s)


@pytest.mark.parametrize("p", [2, 4, 8, LARGE])
def test_two_views_of_a_few_microbatches_are_a_published_case(p: int) -> None:
    """Full: `p` times as fast as naive, and 1.375 times GPipe with the same `m`.

    Two views of `p - 1` microbatches each, `b = 2 f`, and backwards in halves: the
    student has twice as many microbatches, of half the size.
    """
    m = 2 * (p - 1)
    halves = StageCost(0.5, 0.5, 0.5)
    found_s = step_s(order("gpipe", p, 2 * m), m, 1.0, student=halves)
    work_s = m * (1.0 + 3.0)
    assert found_s == pytest.approx(work_s)
    gpipe_s = work_s + (p - 1) * (1.0 + 2.0)
    assert gpipe_s / found_s == pytest.approx(1.375)
