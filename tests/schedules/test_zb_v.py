"""The closed forms of ZB-V that are not in the table."""

from __future__ import annotations

from itertools import pairwise

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
        (4, 16, (1.0, 0.98, 0.5), 1.52),
    ],
)
def test_is_as_others_measured_it(
    p: int, m: int, times: tuple[float, float, float], bubble_s: float
) -> None:
    """torch's order, timed by hand elsewhere."""
    schedule = make_schedule("zb-v", num_devices=p, num_microbatches=m)
    forward_s, input_grad_s, weight_grad_s = times
    costs = Costs.uniform(
        forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s
    )
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s - m * sum(times) == pytest.approx(bubble_s)
    assert max(map(timeline.peak_activations, range(p))) == p


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 8), (4, 7), (8, 24)])
def test_no_device_waits_between_its_ops(p: int, m: int) -> None:
    """All that is idle is before a device's first op, and after its last."""
    timeline = simulate(
        make_schedule("zb-v", num_devices=p, num_microbatches=m), Costs.uniform()
    )
    for starts, ends in zip(timeline.start_s, timeline.end_s, strict=True):
        assert ends[:-2] == pytest.approx(starts[1:-1])


def test_the_next_step_begins_where_this_one_ends() -> None:
    """Who begins late ends late: the way of a first forward is paid once."""
    makespans = [
        simulate(
            make_schedule("zb-v", num_devices=4, num_microbatches=8, num_steps=n),
            Costs.uniform(),
        ).makespan_s
        for n in (1, 2, 3)
    ]
    assert [after - before for before, after in pairwise(makespans)] == [24.0, 24.0]


def test_refuses_other_numbers_of_stages() -> None:
    """And says which schedule takes them."""
    with pytest.raises(ShapeError, match=r"stages_per_device=3: use 2, or interleaved"):
        make_schedule("zb-v", num_devices=2, num_microbatches=4, stages_per_device=3)
