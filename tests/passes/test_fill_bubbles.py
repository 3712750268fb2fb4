"""Bubbles are filled with forwards of another net, and steps take as long."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.simulate import long_step_s
from hocket.errors import PlanError
from hocket.passes.fill_bubbles import fill_bubbles
from hocket.schedules import make_schedule

EACH = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("forward_s", [1.0, 0.6, 0.3])
def test_most_of_a_bubble_is_filled(name: str, forward_s: float) -> None:
    """The step grows by 2 % at most; the trained net's order stays as it is."""
    p = 4
    order = make_schedule(name, num_devices=p, num_microbatches=8)
    costs = Costs((EACH,) * p)
    forwards = [StageCost(forward_s=forward_s)] * p
    filled, joint = fill_bubbles(order, costs, forwards, max_slowdown=0.02)
    check(filled)
    alone_s = long_step_s(order, costs)
    assert long_step_s(filled, joint) <= 1.02 * alone_s + 1e-9
    idle_s = p * alone_s - p * 8 * 3.0
    num = sum(net.num_microbatches for net in filled.program.nets[1:])
    assert num * forward_s >= 0.88 * idle_s
    for lane, before in zip(filled.lanes, order.lanes, strict=True):
        assert tuple(op for op in lane.ops if op.stage < p) == before.ops


def test_forwards_longer_than_any_wait_are_left_out() -> None:
    """The order is as it was: the caller says why."""
    order = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    costs = Costs((EACH, EACH))
    found = fill_bubbles(order, costs, [StageCost(forward_s=5.0)] * 2, max_slowdown=0.0)
    assert found == (order, costs)


def test_costs_are_by_stage() -> None:
    """A device's share says nothing of the single stage."""
    order = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    costs = Costs((EACH,), is_device_share=True)
    with pytest.raises(PlanError, match="costs of 1 stages, and the order has 2"):
        fill_bubbles(order, costs, [EACH] * 2, max_slowdown=0.0)


def test_orders_of_several_steps_are_refused() -> None:
    """A forward belongs to one step, and to one lane of its device."""
    wpipe = make_schedule("wpipe", num_devices=2, num_microbatches=2, num_steps=3)
    costs = Costs((EACH,) * wpipe.program.num_stages)
    with pytest.raises(PlanError, match="of 3 steps in 2 lanes on 2 devices"):
        fill_bubbles(wpipe, costs, [EACH] * 2, max_slowdown=0.0)
