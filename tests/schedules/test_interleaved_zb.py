"""The closed forms of interleaved zero bubble that are not in the table."""

from __future__ import annotations

import pytest

from hocket.errors import ShapeError
from hocket.plan.costs import Costs
from hocket.plan.simulate import simulate
from hocket.schedules import make_schedule


@pytest.mark.parametrize(
    ("p", "m", "times", "bubble_s"),
    [
        (4, 16, (1.0, 1.0, 1.0), 1.5),
        (8, 24, (1.0, 1.0, 1.0), 3.5),
        (4, 16, (1.0, 0.98, 0.5), 2.22),
    ],
)
def test_is_as_others_measured_it(
    p: int, m: int, times: tuple[float, float, float], bubble_s: float
) -> None:
    """torch's order with two stages per rank, timed by hand elsewhere."""
    schedule = make_schedule("interleaved-zb", num_devices=p, num_microbatches=m)
    forward_s, input_grad_s, weight_grad_s = times
    costs = Costs.uniform(
        forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s
    )
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s - m * sum(times) == pytest.approx(bubble_s)
    assert max(map(timeline.peak_activations, range(p))) == p


def test_with_one_stage_per_device_it_is_zb_h1() -> None:
    """The one schedule is the other's case of `v = 1`."""
    interleaved = make_schedule(
        "interleaved-zb", num_devices=4, num_microbatches=8, stages_per_device=1
    )
    assert interleaved == make_schedule("zb-h1", num_devices=4, num_microbatches=8)


@pytest.mark.parametrize(
    ("p", "m", "numbers"), [(4, 9, "8 or 10"), (5, 13, "12 or 14")]
)
def test_refuses_rounds_of_unequal_length(p: int, m: int, numbers: str) -> None:
    """It names itself, and the numbers next to the one given that would do."""
    with pytest.raises(ShapeError, match=rf"^interleaved-zb .*use {numbers} micro"):
        make_schedule("interleaved-zb", num_devices=p, num_microbatches=m)
