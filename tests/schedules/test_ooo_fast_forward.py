"""The closed forms of gradient fast-forwarding that are not in the table."""

from __future__ import annotations

import pytest

from hocket.plan.costs import Costs
from hocket.plan.schedule import Schedule
from hocket.plan.simulate import simulate
from hocket.schedules import make_schedule


def step_s(schedule: Schedule) -> float:
    """One step, where F, I and W take a second each."""
    return simulate(schedule, Costs.uniform()).makespan_s


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(
    ("p", "m", "speed_up"),
    [(4, 4, 1.40), (8, 8, 1.45), (8, 30, 1.14), (16, 32, 1.27), (24, 38, 1.34)],
)
def test_is_as_much_faster_than_gpipe_as_the_model_says(
    p: int, m: int, speed_up: float, push: bool
) -> None:
    """`3 (m + p - 1)` against `3 m + p - 1`, in the settings of the publication."""
    gpipe_s = step_s(make_schedule("gpipe", num_devices=p, num_microbatches=m))
    ours_s = step_s(
        make_schedule("ooo-fast-forward", num_devices=p, num_microbatches=m, push=push)
    )
    assert gpipe_s == 3 * (m + p - 1)
    assert ours_s == 3 * m + p - 1
    assert gpipe_s / ours_s == pytest.approx(speed_up, abs=0.005)


def test_push_is_zb_h1() -> None:
    """Published a year before it, with another argument."""
    pushed = make_schedule(
        "ooo-fast-forward", num_devices=4, num_microbatches=8, push=True
    )
    assert pushed == make_schedule("zb-h1", num_devices=4, num_microbatches=8)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_push_bounds_what_many_microbatches_hold(p: int) -> None:
    """Without it the first device holds nearly twice as many."""
    peaks = [
        simulate(
            make_schedule(
                "ooo-fast-forward", num_devices=p, num_microbatches=4 * p, push=push
            ),
            Costs.uniform(),
        ).peak_activations(device=0)
        for push in (False, True)
    ]
    assert peaks == [2 * p - 1, p]
