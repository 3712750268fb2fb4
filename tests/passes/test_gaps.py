"""What goes into a gap, and what does not."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.passes.delay_weight_gradients import Filled, fill_gaps
from hocket.passes.split_backward import split_backward
from hocket.schedules import make_schedule

few = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def filled(
    p: int, m: int, costs: Costs, *, budget: float = inf, overfill: bool = False
) -> Filled:
    """1F1B with its gaps filled."""
    schedule = split_backward(make_schedule("1f1b", num_devices=p, num_microbatches=m))
    return fill_gaps(schedule, costs, budgets=[budget] * p, overfill=overfill)


@pytest.mark.parametrize("overfill", [False, True])
def test_a_slow_weight_gradient_begins_in_a_short_gap_only_if_asked(
    overfill: bool,
) -> None:
    """Here each W takes ten forwards, and the gaps at most four."""
    costs = Costs.uniform(weight_grad_s=10.0)
    lane = filled(3, 3, costs, overfill=overfill).schedule.lanes[1]
    kinds = [op.kind for op in lane.ops]
    last = max(i for i, kind in enumerate(kinds) if kind is Kind.BACKWARD_INPUT)
    assert (kinds.index(Kind.BACKWARD_WEIGHT) < last) == overfill


@few
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 10),
    seconds=st.tuples(*[st.integers(1, 4)] * 3),
    message_s=st.sampled_from([0.0, 0.5]),
)
def test_what_is_not_overfilled_delays_nothing(
    p: int, m: int, seconds: tuple[int, int, int], message_s: float
) -> None:
    """Every F and I begins when it would if no W were done before the end."""
    forward, input_grad, weight_grad = map(float, seconds)
    costs = Costs.uniform(
        forward_s=forward,
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
        message_s=message_s,
    )
    free = Costs.uniform(
        forward_s=forward,
        input_grad_s=input_grad,
        weight_grad_s=0.0,
        message_s=message_s,
    )
    schedule = filled(p, m, costs).schedule
    works = (Kind.FORWARD, Kind.BACKWARD_INPUT)
    found, least = (
        {s.op: s.start_s for s in simulate(schedule, c).spans if s.op.kind in works}
        for c in (costs, free)
    )
    assert found == pytest.approx(least)


@few
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 10),
    held=st.integers(0, 10),
    spare=st.integers(0, 40),
)
def test_a_budget_is_kept_where_weight_gradients_can_keep_it(
    p: int, m: int, held: int, spare: int
) -> None:
    """What forwards of 1F1B leave, and as much as is spare for W that wait."""
    share = StageCost(1.0, 1.0, 3.0, activation_bytes=10, weight_grad_held_bytes=held)
    costs = Costs((share,), is_device_share=True)
    budget = 10 * p + spare
    result = filled(p, m, costs, budget=budget)
    assert max(result.peak_bytes) <= budget
    timeline = simulate(result.schedule, costs)
    for device in range(p):  # nothing else is held here, so it is the simulator's too
        assert timeline.peak_bytes(device) == result.peak_bytes[device]
