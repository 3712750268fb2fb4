"""The closed forms of Hanayo that are not in the table, and what it refuses."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import make_schedule


@pytest.mark.parametrize("num_waves", [1, 2, 3])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_more_waves_make_a_shorter_bubble(p: int, num_waves: int) -> None:
    """One round has the paper's bubble, for backwards of one and two forwards.

    There the authors' `(2D - 2) / (3WD + D - 1)` is somewhat more than happens.
    """
    v = 2 * num_waves
    schedule = make_schedule(
        "hanayo", num_devices=p, num_microbatches=p, stages_per_device=v
    )
    even = simulate(schedule, Costs.uniform(forward_s=2.0))
    assert even.bubble_fraction == pytest.approx((p - 1) / (v * p + p - 1))
    longer = simulate(schedule, Costs.uniform())
    idle = 4 * (p - 1)
    assert longer.bubble_fraction == pytest.approx(idle / (3 * v * p + idle))
    published = (2 * p - 2) / (3 * num_waves * p + p - 1)
    assert longer.bubble_fraction <= published


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_one_wave_is_as_good_as_chimera_on_twice_the_devices(
    p: int, num_rounds: int
) -> None:
    """The paper's starting point: a copy of the net is worth as much as a turn."""
    costs = Costs.uniform(forward_s=2.0)
    bubbles = [
        simulate(
            make_schedule(name, num_devices=n, num_microbatches=num_rounds * n), costs
        ).bubble_fraction
        for name, n in (("hanayo", p), ("chimera", 2 * p))
    ]
    assert bubbles[0] == pytest.approx(bubbles[1])


@pytest.mark.parametrize("num_waves", [1, 2])
def test_turns_send_nothing(num_waves: int) -> None:
    """Per microbatch and way there are as many messages as hops between devices."""
    p, m, v = 4, 8, 2 * num_waves
    schedule = make_schedule(
        "hanayo", num_devices=p, num_microbatches=m, stages_per_device=v
    )
    transfers = [*simulate(schedule, Costs.uniform()).transfers]
    assert len(transfers) == 2 * m * v * (p - 1)


def test_refuses_odd_stages_and_broken_rounds() -> None:
    """The error names the numbers that would work."""
    with pytest.raises(ShapeError, match=r"stages_per_device=3: use 2 or 4"):
        make_schedule("hanayo", num_devices=2, num_microbatches=4, stages_per_device=3)
    with pytest.raises(ShapeError, match=r"num_microbatches=6: use 4 or 8"):
        make_schedule("hanayo", num_devices=4, num_microbatches=6)
    with pytest.raises(ShapeError, match=r"num_microbatches=3: use 4$"):
        make_schedule("hanayo", num_devices=4, num_microbatches=3)
