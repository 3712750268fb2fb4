"""V-Min and V-Half repeat a bubble with unequal times, and a warning says so."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings

from hocket.core.costs import StageCost
from hocket.schedules import make_schedule
from hocket.schedules.entry import microbatch_s
from hocket.schedules.v_half import v_half
from hocket.schedules.v_min import RepeatingBubbleWarning, repeating_bubble_s, v_min
from tests.strategies import shares


def share(forward_s: float, input_grad_s: float, weight_grad_s: float) -> StageCost:
    """What a device's whole share costs."""
    return StageCost(
        forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s
    )


@pytest.mark.parametrize("p", [2, 4, 8])
def test_equal_times_repeat_no_bubble(p: int) -> None:
    """That is what the blocks are made for."""
    assert repeating_bubble_s(v_min, p, share(1.0, 1.0, 1.0)) == pytest.approx(0.0)


@pytest.mark.parametrize("times", [(1.0, 0.98, 0.5), (1.0, 1.3, 0.7)])
def test_unequal_times_repeat_one(times: tuple[float, float, float]) -> None:
    """V-Min repeats a fifth and a quarter of the work on 8 devices, as published."""
    bubble_s = repeating_bubble_s(v_min, 8, share(*times))
    assert 0.1 < bubble_s / (bubble_s + sum(times)) < 0.3


@settings(max_examples=15)
@given(any_share=shares())
def test_v_half_repeats_none_while_times_are_not_too_unequal(
    any_share: StageCost,
) -> None:
    """The authors' condition: `W + 2I >= 2F` and `W + 2F >= 2I`."""
    forward_s, input_grad_s = any_share.forward_s, any_share.input_grad_s
    if abs(2 * forward_s - 2 * input_grad_s) <= any_share.weight_grad_s:
        bubble_s = repeating_bubble_s(v_half, 4, any_share)
        assert bubble_s <= 0.01 * microbatch_s(any_share)


def test_who_gives_measured_times_is_warned_with_the_numbers() -> None:
    """The times, the bubble that they repeat, and what to take instead."""
    with pytest.warns(RepeatingBubbleWarning) as caught:
        make_schedule(
            "v-min", num_devices=8, num_microbatches=16, share=share(1.0, 1.3, 0.7)
        )
    text = str(caught[0].message)
    assert "forward (1 s), input gradient (1.3 s) and weight gradient (0.7 s)" in text
    assert "on 8 devices" in text
    assert "Take v-half, which repeats 0 s" in text


def test_equal_times_are_no_reason_to_warn() -> None:
    """Equal times give no warning, and times never change the order."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_share = make_schedule(
            "v-min", num_devices=4, num_microbatches=8, share=share(2.0, 2.0, 2.0)
        )
    assert with_share == make_schedule("v-min", num_devices=4, num_microbatches=8)
