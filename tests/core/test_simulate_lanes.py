"""Several lanes on one device, by hand: they slow each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from tests.core.support.spans import spans

# Weight gradients on a stream of their own: F takes 2, I 1 and W 3.
TWO_LANES = Schedule.parse("d0    0F0 0I0 0F1 0I1\nd0.1  0W0 0W1")
COST = StageCost(2.0, 1.0, 3.0)


def test_two_lanes_share_one_device() -> None:
    """Capacity 1: each works half as fast while the other does, by hand.

    t   0    2    3         7    9      12
    d0  F0   I0   F1        I1   |
    .1            W0 ............W1     |     W0 has 1 left of 3 at 7
    """
    timeline = simulate(TWO_LANES, Costs((COST,), lane_capacity=1.0))

    assert spans(timeline) == {
        "0F0": (0, 2),
        "0I0": (2, 3),
        "0F1": (3, 7),
        "0I1": (7, 9),
        "0W0": (3, 9),
        "0W1": (9, 12),
    }


def test_device_with_room_for_both_lanes() -> None:
    """Capacity 2: they do not disturb each other."""
    timeline = simulate(TWO_LANES, Costs((COST,), lane_capacity=2.0))

    assert spans(timeline) == {
        "0F0": (0, 2),
        "0I0": (2, 3),
        "0F1": (3, 5),
        "0I1": (5, 6),
        "0W0": (3, 6),
        "0W1": (6, 9),
    }


def test_device_with_room_for_one_and_a_half() -> None:
    """Capacity 1.5: each at three quarters of its speed while both work."""
    found = spans(simulate(TWO_LANES, Costs((COST,), lane_capacity=1.5)))

    assert found["0F1"] == pytest.approx((3, 3 + 2 / 0.75))
    assert found["0I1"] == pytest.approx((3 + 2 / 0.75, 7))
    assert found["0W0"] == pytest.approx((3, 7))
    assert found["0W1"] == pytest.approx((7, 10))


def test_three_lanes_share_one_device() -> None:
    """Three forwards of 1, 2 and 3 s: pace 1/3, then 1/2, then 1."""
    schedule = Schedule.parse(
        """
        net a microbatches=1
        stage 0 net=a device=0 trainable=no
        stage 1 net=a device=0 trainable=no
        stage 2 net=a device=0 trainable=no
        d0    0F0
        d0.1  1F0
        d0.2  2F0
        """
    )
    costs = Costs((StageCost(1.0), StageCost(2.0), StageCost(3.0)))

    ends = [float(end) for (end,) in simulate(schedule, costs).end_s]
    assert ends == pytest.approx([3.0, 5.0, 6.0])


def test_other_devices_are_not_slowed() -> None:
    """Two lanes on device 0 leave device 1 alone."""
    schedule = Schedule.parse(
        """
        net a microbatches=1
        stage 0 net=a device=0 trainable=no
        stage 1 net=a device=0 trainable=no
        stage 2 net=a device=1 trainable=no
        d0    0F0
        d0.1  1F0
        d1    2F0
        """
    )
    cost = StageCost(1.0)

    found = spans(simulate(schedule, Costs((cost, cost, cost))))
    assert found == {"0F0": (0, 2), "1F0": (0, 2), "2F0": (0, 1)}


@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_no_work_is_lost_in_sharing(seconds: list[int]) -> None:
    """At capacity 1 a device with work is done after the sum of it, on any lanes."""
    stages = "\n".join(
        f"stage {i} net=a device=0 trainable=no" for i in range(len(seconds))
    )
    lanes = "\n".join(f"d0.{i}  {i}F0" for i in range(len(seconds)))
    schedule = Schedule.parse(f"net a microbatches=1\n{stages}\n{lanes}")
    costs = Costs(tuple(StageCost(float(s)) for s in seconds))

    assert simulate(schedule, costs).makespan_s == pytest.approx(sum(seconds))


def test_lane_waits_for_another_lane_of_its_device() -> None:
    """A value of one lane is there for the other as soon as it is made."""
    found = spans(simulate(Schedule.parse("d0  0F0 0I0 0U\nd0.1  0W0"), Costs((COST,))))

    assert found["0W0"] == (3, 6)
    assert found["0U"] == (6, 6)
