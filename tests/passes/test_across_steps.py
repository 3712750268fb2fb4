"""W and U in the next step's forward: what it gains, and that no weight is old."""

from __future__ import annotations

import pytest

import hocket
from hocket.core.footprint import Footprint
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.passes.across_steps import carry_weight_gradients, several_steps
from hocket.passes.beside_critical_path import MeasuredProgram, beside_critical_path

NUM_STAGES = 8


def measured(weight_grad_s: float) -> MeasuredProgram:
    """Stages that take 1 s forward, and 1 s for the gradient of the input."""
    cost = hocket.StageCost(1.0, 1.0, weight_grad_s)
    costs = hocket.Costs((cost,) * NUM_STAGES, lane_capacity=2.0)
    return MeasuredProgram(Program.chain([0] * NUM_STAGES, 1), costs, Footprint((), {}))


def test_long_weight_gradients_run_in_the_forward() -> None:
    """Beside the backward alone both lanes have W left, 3 s behind the last I.

    Across steps lane 0 waits a little: F of stage 0 for its own W at least.
    """
    facts = measured(1.5)
    beside = hocket.simulate(beside_critical_path(facts).schedule, facts.costs)
    assert beside.makespan_s == 2 * NUM_STAGES + 3.0
    order = several_steps(carry_weight_gradients(facts), 6)
    step_s = hocket.simulate(order, facts.costs).step_s
    assert 2 * NUM_STAGES + 1.5 <= step_s < 2 * NUM_STAGES + 3.0


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_the_whole_order_is_right_for_any_number_of_steps(num_steps: int) -> None:
    """Each op once, and each forward reads the weights of all updates before it."""
    order = several_steps(carry_weight_gradients(measured(1.0)), num_steps)
    hocket.check(order)
    assert order.program.num_steps == num_steps
    assert not any(stage.delay for stage in order.program.stages)
    late = [op for op in order.lanes[1].ops if op.kind is Kind.UPDATE]
    assert [op.step for op in late] == sorted(op.step for op in late)
    assert order.with_num_steps(7).program.num_steps == 7
