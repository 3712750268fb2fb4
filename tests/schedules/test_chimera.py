"""The closed forms of Chimera that are not in the table, and what it refuses."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import make_schedule


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("num_rounds", [1, 2, 4])
def test_bubble_is_the_share_that_the_paper_says(p: int, num_rounds: int) -> None:
    """`(D - 2) / (2N + D - 2)`, where a backward takes as long as a forward."""
    m = num_rounds * p
    schedule = make_schedule("chimera", num_devices=p, num_microbatches=m)
    timeline = simulate(schedule, Costs.uniform(forward_s=2.0))
    assert timeline.bubble_fraction == pytest.approx((p - 2) / (2 * m + p - 2))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_activations_are_between_half_and_all_of_1f1bs(p: int) -> None:
    """From `D / 2 + 1` to `D` microbatches, of which each is in one of two stages."""
    schedule = make_schedule("chimera", num_devices=p, num_microbatches=2 * p)
    timeline = simulate(schedule, Costs.uniform())
    held = [2 * timeline.peak_activations(device) for device in range(p)]
    assert (min(held), max(held)) == (p / 2 + 1, p)


def test_the_two_nets_are_mirrored() -> None:
    """Each device has the stages of one that is as far from the other end."""
    program = make_schedule("chimera", num_devices=4, num_microbatches=4).program
    assert [net.name for net in program.nets] == ["down", "up"]
    assert program.stages_on == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert (3, 4) not in program.flows
    assert program.copies == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [program.num_microbatches_of(stage) for stage in range(8)] == [2] * 8


@pytest.mark.parametrize(
    ("numbers", "choice"),
    [
        ({"num_devices": 1}, "num_devices=1: use 2"),
        ({"num_devices": 5}, "num_devices=5: use 4 or 6"),
        ({"stages_per_device": 1}, "stages_per_device=1: use 2"),
        ({"num_microbatches": 6}, "num_microbatches=6: use 4 or 8"),
        ({"num_microbatches": 2}, "num_microbatches=2: use 4"),
    ],
)
def test_refuses_what_cannot_be_mirrored(numbers: dict[str, int], choice: str) -> None:
    """The error names the numbers that would work."""
    given = {"num_devices": 4, "num_microbatches": 4, **numbers}
    with pytest.raises(ShapeError, match=f"{choice}$"):
        make_schedule("chimera", **given)
