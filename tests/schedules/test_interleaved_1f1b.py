"""The closed forms of interleaved 1F1B, and the numbers that it refuses."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import make_schedule


@pytest.mark.parametrize(
    ("v", "bubble_s", "most", "least"), [(2, 4.5, 5.5, 2.5), (4, 2.25, 4.75, 3.25)]
)
def test_is_as_others_measured_it(
    v: int, bubble_s: float, most: float, least: float
) -> None:
    """torch's order for 4 ranks and 16 microbatches, timed by hand elsewhere.

    Forward, input and weight gradient take one second per rank each.
    """
    schedule = make_schedule(
        "interleaved-1f1b", num_devices=4, num_microbatches=16, stages_per_device=v
    )
    timeline = simulate(schedule, Costs.uniform())
    peaks = [timeline.peak_activations(device) for device in range(4)]
    assert timeline.makespan_s - 16 * 3.0 == pytest.approx(bubble_s)
    assert (max(peaks), min(peaks)) == pytest.approx((most, least))


@pytest.mark.parametrize("v", [2, 3, 4])
def test_bubble_shrinks_with_the_stages_per_device(v: int) -> None:
    """Section 2.2.2 of arXiv:2104.04473: a `v` times smaller bubble than 1F1B's."""
    plain = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    interleaved = make_schedule(
        "interleaved-1f1b", num_devices=4, num_microbatches=8, stages_per_device=v
    )
    work_s = 8 * 3.0
    plain_s = simulate(plain, Costs.uniform()).makespan_s - work_s
    interleaved_s = simulate(interleaved, Costs.uniform()).makespan_s - work_s
    assert interleaved_s == pytest.approx(plain_s / v)


@pytest.mark.parametrize(
    ("p", "m", "numbers"),
    [(4, 9, "8 or 10"), (4, 11, "10 or 12"), (2, 5, "4 or 6"), (5, 13, "12 or 14")],
)
def test_refuses_rounds_of_unequal_length(p: int, m: int, numbers: str) -> None:
    """The error names the nearest numbers that would work."""
    with pytest.raises(ShapeError) as caught:
        make_schedule("interleaved-1f1b", num_devices=p, num_microbatches=m)
    assert f"num_microbatches={m}" in str(caught.value)
    assert f"num_devices={p}" in str(caught.value)
    assert f"use {numbers} microbatches" in str(caught.value)
    for number in numbers.split(" or "):
        make_schedule("interleaved-1f1b", num_devices=p, num_microbatches=int(number))


def test_with_one_stage_per_device_it_warms_up_twice_as_long() -> None:
    """A hop of 0.25 s costs nothing with a warm-up of two forwards per hop."""
    costs = Costs.uniform(message_s=0.25)
    steady_s = [
        simulate(
            make_schedule(
                "interleaved-1f1b",
                num_devices=4,
                num_microbatches=m,
                stages_per_device=1,
            ),
            costs,
        ).makespan_s
        for m in (20, 40)
    ]
    assert steady_s[1] - steady_s[0] == pytest.approx(20 * 3.0)
