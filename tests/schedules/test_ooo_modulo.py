"""The closed forms of modulo allocation, and the choice of a group's size."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import make_schedule
from hocket.schedules.ooo_modulo import group_size

LAYER = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
NUM_LAYERS = 24


def step_s(name: str, p: int, m: int, size: int, message_s: float) -> float:
    """One step of 24 layers, in units of one layer's F."""
    v = NUM_LAYERS // (p * size) if name == "ooo-modulo" else 1
    schedule = make_schedule(
        name, num_devices=p, num_microbatches=m, stages_per_device=v
    )
    seconds = NUM_LAYERS / p
    costs = Costs.uniform(
        forward_s=seconds,
        input_grad_s=seconds,
        weight_grad_s=seconds,
        message_s=message_s,
    )
    return simulate(schedule, costs).makespan_s


@pytest.mark.parametrize(
    ("p", "m", "size", "speed_up"),
    [
        (4, 4, 1, 1.68),
        (4, 4, 2, 1.62),
        (4, 4, 3, 1.56),
        (8, 8, 1, 1.71),
        (8, 8, 3, 1.45),
    ],
)
def test_is_as_much_faster_than_gpipe_as_the_model_says(
    p: int, m: int, size: int, speed_up: float
) -> None:
    """`3 (m + p - 1)` against `3 m + (p - 1) / v`, with links that cost nothing."""
    share_s = NUM_LAYERS / p
    v = NUM_LAYERS // (p * size)
    gpipe_s = step_s("gpipe", p, m, size, 0.0)
    ours_s = step_s("ooo-modulo", p, m, size, 0.0)
    assert gpipe_s == pytest.approx(share_s * 3 * (m + p - 1))
    assert ours_s == pytest.approx(share_s * (3 * m + (p - 1) / v))
    assert gpipe_s / ours_s == pytest.approx(speed_up, abs=0.005)


@pytest.mark.parametrize(
    ("message_s", "idle", "fast_forward", "by_size"),
    [
        (0.0, 0.429, 1.40, {1: 1.68, 2: 1.62, 3: 1.56}),
        (0.5, 0.442, 1.32, {1: 1.47, 2: 1.50, 3: 1.47}),
        (2.0, 0.478, 1.33, {1: 0.94, 2: 1.30, 3: 1.37}),
    ],
)
def test_messages_cost_what_the_model_says(
    message_s: float, idle: float, fast_forward: float, by_size: dict[int, float]
) -> None:
    """On 4 devices with 4 microbatches; as fast as there, or faster."""
    gpipe_s = step_s("gpipe", 4, 4, 1, message_s)
    assert 1 - 3 * NUM_LAYERS / gpipe_s == pytest.approx(idle, abs=5e-4)
    plain_s = step_s("ooo-fast-forward", 4, 4, 1, message_s)
    assert gpipe_s / plain_s > fast_forward - 0.015
    for size, speed_up in by_size.items():
        ours_s = step_s("ooo-modulo", 4, 4, size, message_s)
        assert gpipe_s / ours_s > speed_up - 0.015


@pytest.mark.parametrize(("message_s", "size"), [(0.0, 1), (0.5, 2), (2.0, 3)])
def test_slower_links_want_larger_groups(message_s: float, size: int) -> None:
    """The best group grows with latency, for 24 layers and 4 microbatches."""
    link = Link(latency_s=message_s)
    assert group_size(NUM_LAYERS, 4, 4, layer=LAYER, link=link) == size


def test_a_link_that_is_slow_enough_wants_no_dealing_out() -> None:
    """Each device has its layers in one piece, if messages are slow."""
    link = Link(latency_s=100.0)
    assert group_size(NUM_LAYERS, 4, 4, layer=LAYER, link=link) == NUM_LAYERS // 4


def test_with_one_stage_per_device_it_is_fast_forwarding() -> None:
    """The largest group is the whole share."""
    assert make_schedule(
        "ooo-modulo", num_devices=4, num_microbatches=6, stages_per_device=1
    ) == make_schedule("ooo-fast-forward", num_devices=4, num_microbatches=6)


def test_refuses_layers_that_cannot_be_dealt_out() -> None:
    """The error names the nearest numbers that would work."""
    with pytest.raises(ShapeError, match=r"num_layers=25 .*: use 24 or 28 layers"):
        group_size(25, 4, 4, layer=LAYER, link=Link())
