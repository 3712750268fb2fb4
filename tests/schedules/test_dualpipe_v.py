"""The closed forms of DualPipeV that are not in the table, and what it refuses."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import make_schedule


@pytest.mark.parametrize(
    ("p", "m", "times", "bubble_s"),
    [
        (4, 16, (1.0, 1.0, 1.0), 1.5),
        (8, 24, (1.0, 1.0, 1.0), 3.5),
        (4, 16, (1.0, 0.98, 0.5), 2.22),
    ],
)
def test_ops_in_turn_lose_less_than_pairs_that_end_together(
    p: int, m: int, times: tuple[float, float, float], bubble_s: float
) -> None:
    """Half of 3.0 and 7.0 s, as which the authors' formula has equal times."""
    schedule = make_schedule("dualpipe-v", num_devices=p, num_microbatches=m)
    forward_s, input_grad_s, weight_grad_s = times
    costs = Costs.uniform(
        forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s
    )
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s - m * sum(times) == pytest.approx(bubble_s)
    assert {timeline.peak_activations(device) for device in range(p)} == {p + 0.5}


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 7)])
def test_refuses_fewer_microbatches_than_stages(p: int, m: int) -> None:
    """The error names the fewest microbatches that would work."""
    with pytest.raises(ShapeError) as caught:
        make_schedule("dualpipe-v", num_devices=p, num_microbatches=m)
    assert f"num_microbatches={m}" in str(caught.value)
    assert f"use {2 * p} or more" in str(caught.value)
    make_schedule("dualpipe-v", num_devices=p, num_microbatches=2 * p)
