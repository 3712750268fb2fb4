"""torchsched's rule, and the list schedule, on programs with known costs."""

from __future__ import annotations

import pytest

import hocket
from hocket.core.footprint import Footprint
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.passes.beside_critical_path import (
    MeasuredProgram,
    beside_critical_path,
    longest_path,
    stages_beside,
    with_inline,
)
from hocket.passes.serial import serial

NUM_STAGES = 5


def measured(weight_grad_s: float, capacity: float = 2.0) -> MeasuredProgram:
    """Stages that take 1 s forward, and 1 s for the gradient of the input."""
    program = Program.chain([0] * NUM_STAGES, 1)
    cost = hocket.StageCost(1.0, 1.0, weight_grad_s)
    costs = hocket.Costs((cost,) * NUM_STAGES, lane_capacity=capacity)
    events = {
        **{(Kind.FORWARD, i): (i + 1,) for i in range(NUM_STAGES)},
        **{(Kind.BACKWARD_WEIGHT, i): (-(i + 1),) for i in range(NUM_STAGES)},
    }
    return MeasuredProgram(program, costs, Footprint((10,) * NUM_STAGES, events))


@pytest.mark.parametrize("weight_grad_s", [0.25, 1.0])
def test_hides_all_but_the_last_weight_gradient(weight_grad_s: float) -> None:
    """2n seconds for F and I, and one W behind the last I."""
    facts = measured(weight_grad_s)
    plan = beside_critical_path(facts)
    hocket.check(plan.schedule)
    expected = 2 * NUM_STAGES + weight_grad_s
    assert hocket.simulate(plan.schedule, facts.costs).makespan_s == expected


def test_is_as_slow_as_the_serial_order_where_lanes_share_everything() -> None:
    """With the capacity of one lane there is nothing to hide in."""
    facts = measured(1.0, capacity=1.0)
    for order in (
        beside_critical_path(facts).schedule,
        longest_path(facts.program, facts.costs),
        serial(facts.program),
    ):
        hocket.check(order)
        made = hocket.simulate(order, facts.costs).makespan_s
        assert made == pytest.approx(3 * NUM_STAGES)


def test_both_lanes_share_long_weight_gradients() -> None:
    """Where W take longer than I, the free lane 0 takes what is left."""
    facts = measured(4.0)
    order = beside_critical_path(facts).schedule
    in_main = [stage for stage, beside in stages_beside(order).items() if not beside]
    assert in_main
    assert hocket.simulate(order, facts.costs).makespan_s < NUM_STAGES * 5


@pytest.mark.parametrize("num_inline", range(NUM_STAGES + 1))
def test_keeps_stages_inline(num_inline: int) -> None:
    """Their W and U stand behind their I, in lane 0."""
    facts = measured(1.0)
    plan = with_inline(facts, range(num_inline))
    hocket.check(plan.schedule)
    ops = plan.schedule.lanes[0].ops
    for stage in range(num_inline):
        at = ops.index(Op(Kind.BACKWARD_INPUT, stage, 0))
        assert ops[at + 1 : at + 3] == (
            Op(Kind.BACKWARD_WEIGHT, stage, 0),
            Op(Kind.UPDATE, stage),
        )
