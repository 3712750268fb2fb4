"""The closed forms of GPipe that are not in the table."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.schedules import make_schedule


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 4), (4, 32), (8, 8)])
def test_bubble_is_the_share_that_the_paper_says(p: int, m: int) -> None:
    """Section 2.3: of `m + p - 1` slots of a device, `p - 1` are empty."""
    schedule = make_schedule("gpipe", num_devices=p, num_microbatches=m)
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_steps_follow_each_other_without_overlap() -> None:
    """The first forward of a step waits for the update after the last backward."""
    one, three = (
        make_schedule("gpipe", num_devices=3, num_microbatches=4, num_steps=n)
        for n in (1, 3)
    )
    costs = Costs.uniform(update_s=0.5)
    one_s = simulate(one, costs).makespan_s
    assert simulate(three, costs).makespan_s == pytest.approx(3 * one_s)
