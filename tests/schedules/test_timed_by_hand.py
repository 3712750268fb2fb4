"""Schedules of torch's, as others timed them by hand."""

from __future__ import annotations

import pytest

from hocket.plan.costs import Costs
from hocket.plan.simulate import simulate
from hocket.schedules import make_schedule

EQUAL = (1.0, 1.0, 1.0)
UNEQUAL = (1.0, 0.98, 0.5)


@pytest.mark.parametrize(
    ("name", "p", "m", "times", "bubble_s"),
    [
        ("zb-v", 4, 16, EQUAL, 1.5),
        ("zb-v", 8, 24, EQUAL, 3.5),
        ("zb-v", 4, 16, UNEQUAL, 1.52),
        ("interleaved-zb", 4, 16, EQUAL, 1.5),
        ("interleaved-zb", 8, 24, EQUAL, 3.5),
        ("interleaved-zb", 4, 16, UNEQUAL, 2.22),
    ],
)
def test_is_as_others_timed_it(
    name: str, p: int, m: int, times: tuple[float, float, float], bubble_s: float
) -> None:
    """Two stages per device; the bubble, and as many activations as devices."""
    schedule = make_schedule(name, num_devices=p, num_microbatches=m)
    forward_s, input_grad_s, weight_grad_s = times
    costs = Costs.uniform(
        forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s
    )
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s - m * sum(times) == pytest.approx(bubble_s)
    assert max(map(timeline.peak_activations, range(p))) == p
