"""What the orders of bench/teacher can show: closed forms of their steps."""

from __future__ import annotations

import pytest

from bench.teacher.models import CASES, Case
from bench.teacher.orders import filled, teacher_first
from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate


def costs_of(case: Case, scale: float = 1.0) -> Costs:
    """Seconds in forwards of the student's stages, the backward twice as long."""
    teacher = StageCost(case.forward_ratio * scale)
    return Costs((teacher, teacher, *[StageCost(scale, scale, scale)] * 2))


def step_s(order: Schedule, costs: Costs) -> float:
    """The seconds of a step in a long run."""
    few, many = (simulate(order.with_num_steps(n), costs).makespan_s for n in (10, 20))
    return (many - few) / 10


@pytest.mark.parametrize("name", CASES)
def test_no_order_is_1_8_times_as_fast_as_one_device_at_a_time(name: str) -> None:
    """Filled orders take the work alone, which no order beats.

    The naive one takes less than twice as long: the student's first forward runs beside
    the second half of the teacher.
    """
    case, m = CASES[name], CASES[name].num_microbatches
    t, whole = case.forward_ratio, 1.0 * m
    naive_s = step_s(teacher_first("gpipe", 2, 1), costs_of(case, whole))
    assert naive_s == pytest.approx(m * (t + max(t, 1.0) + 1.0 + 2 * 2.0))
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        order = filled(schedule, 2, m, m, costs_of(case))
        best_s = step_s(order, costs_of(case))
        assert best_s == pytest.approx(m * (t + 3.0))
        assert naive_s / best_s == pytest.approx((2 * t + 5) / (t + 3))
    assert (2 * t + 5) / (t + 3) <= 1.8
