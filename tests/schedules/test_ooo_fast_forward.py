"""The closed forms of gradient fast-forwarding that are not in the table."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.schedules import make_schedule


def step_s(schedule: Schedule) -> float:
    """One step, where F, I and W take a second each."""
    return simulate(schedule, Costs.uniform()).makespan_s


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(
    ("p", "m", "speed_up"),
    [
        (4, 4, 1.40),
        (8, 8, 1.45),
        (8, 30, 1.14),
        (16, 32, 1.27),
        (24, 38, 1.34),
        (32, 40, 1.41),
    ],
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


@pytest.mark.parametrize(
    ("p", "m", "speed_up"),
    [(8, 30, 1.53), (16, 32, 1.69), (24, 38, 1.78), (32, 40, 1.88)],
)
def test_a_gpipe_that_recomputes_is_slower_still(
    p: int, m: int, speed_up: float
) -> None:
    """`4 (m + p - 1)`: each backward begins with another forward."""
    gpipe = make_schedule("gpipe", num_devices=p, num_microbatches=m)
    gpipe_s = simulate(gpipe, Costs.uniform(input_grad_s=2.0)).makespan_s
    ours = make_schedule("ooo-fast-forward", num_devices=p, num_microbatches=m)
    assert gpipe_s == 4 * (m + p - 1)
    assert gpipe_s / step_s(ours) == pytest.approx(speed_up, abs=0.005)


def test_push_is_zb_h1() -> None:
    """Published a year before it, with another argument."""
    pushed = make_schedule(
        "ooo-fast-forward", num_devices=4, num_microbatches=8, push=True
    )
    assert pushed == make_schedule("zb-h1", num_devices=4, num_microbatches=8)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_push_bounds_what_many_microbatches_hold(p: int) -> None:
    """The first device holds nearly twice as many microbatches without `push`."""
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


@given(p=st.integers(1, 8), m=st.integers(1, 24))
def test_push_lets_p_microbatches_be_between_f_and_w(p: int, m: int) -> None:
    """On every device, and no more: the cap of the publication's artifact."""
    schedule = make_schedule(
        "ooo-fast-forward", num_devices=p, num_microbatches=m, push=True
    )
    for lane in schedule.lanes:
        assert max(accumulate(map(taken, lane.ops))) == min(p, m)


def taken(op: Op) -> int:
    """By how many microbatches more than before a device holds something of."""
    return (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD_WEIGHT)
