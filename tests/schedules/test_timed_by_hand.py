"""Schedules of torch's, as others timed and counted them by hand."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
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


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "bubble_s", "most", "num_messages"),
    [
        ("gpipe", 4, 16, 1, 9.0, 16.0, 6),
        ("gpipe", 8, 24, 1, 21.0, 24.0, 14),
        ("interleaved-1f1b", 4, 16, 2, 4.5, 5.5, 14),
        ("interleaved-1f1b", 8, 24, 2, 10.5, 11.5, 30),
        ("interleaved-1f1b", 4, 16, 4, 2.25, 4.75, 30),
        ("interleaved-1f1b", 8, 24, 4, 5.25, 9.75, 62),
        ("looped-bfs", 4, 16, 2, 4.5, 16.0, 14),
        ("interleaved-zb", 4, 16, 2, 1.5, 4.0, 14),
        ("zb-v", 4, 16, 2, 1.5, 4.0, 12),
        ("v-half", 4, 16, 2, 2.5, 3.0, 12),
        ("v-min", 4, 16, 2, 5.5, 2.0, 12),
        ("dualpipe-v", 4, 16, 2, 1.5, 4.5, 12),
    ],
)
def test_equal_times_are_as_others_counted_them(
    name: str,
    p: int,
    m: int,
    v: int,
    bubble_s: float,
    most: float,
    num_messages: int,
) -> None:
    """Bubble, activations of the fullest device, and messages of a microbatch.

    A chain of stages sends `2 (v p - 1)`, and two less where it turns on a device.
    """
    schedule = make_schedule(
        name, num_devices=p, num_microbatches=m, stages_per_device=v
    )
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.makespan_s - 3 * m == pytest.approx(bubble_s)
    assert max(map(timeline.peak_activations, range(p))) == most
    assert len([*timeline.transfers]) == num_messages * m


@pytest.mark.parametrize(
    ("name", "times", "bubble"),
    [
        ("v-min", EQUAL, 0.066),
        ("v-half", EQUAL, 0.042),
        ("zb-v", EQUAL, 0.018),
        ("v-min", UNEQUAL, 0.226),
        ("v-half", UNEQUAL, 0.063),
        ("zb-v", UNEQUAL, 0.022),
        ("v-min", (1.0, 1.3, 0.7), 0.273),
        ("v-half", (1.0, 1.3, 0.7), 0.063),
        ("zb-v", (1.0, 1.3, 0.7), 0.023),
    ],
)
def test_many_microbatches_leave_the_bubble_that_others_saw(
    name: str, times: tuple[float, float, float], bubble: float
) -> None:
    """On 8 devices with 64 microbatches.

    Squeezed our way, V-Half with unequal times has a hundredth more.
    """
    schedule = make_schedule(name, num_devices=8, num_microbatches=64)
    is_squeezed = name != "zb-v" and times != EQUAL
    costs = Costs.uniform(
        forward_s=times[0], input_grad_s=times[1], weight_grad_s=times[2]
    )
    assert simulate(schedule, costs).bubble_fraction <= bubble + (
        0.011 if is_squeezed else 5e-4
    )
