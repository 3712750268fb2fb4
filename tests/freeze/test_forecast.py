"""The rest of a run follows from simulated steps, at the pace of those measured."""

from __future__ import annotations

from statistics import NormalDist, fmean

import pytest

from hocket.freeze.forecast import Pace, StepTimes, Stretch, rest_s

NOW = Stretch(0, 1, 2.0)
LATER = Stretch(10, 1, 1.0, 5.0)


def test_each_stretch_has_its_own_steps_and_one_change() -> None:
    """By hand: 6 steps of 2 s, a change of 5 s, 20 of 1 s; then only what is left."""
    ahead = [NOW, LATER]
    assert rest_s(ahead, 4, 30, Pace()) == 6 * 2.0 + 5.0 + 20 * 1.0
    assert rest_s(ahead, 10, 30, Pace()) == 5.0 + 20 * 1.0
    assert rest_s(ahead, 4, 8, Pace()) == 4 * 2.0
    assert rest_s(ahead, 30, 30, Pace()) == 0.0
    assert rest_s([], 0, 0, Pace()) == 0.0


def test_later_steps_are_as_much_longer_as_the_measured_ones() -> None:
    """Three times the simulated ones, and half a second outside of the order."""
    pace = Pace.of([99.0, 6.0, 6.0], [9.0, 0.5, 0.5], NOW)
    assert pace == (3.0, 0.0, 0.5, 0.0)
    assert rest_s([NOW, LATER], 0, 20, pace) == 10 * 6.5 + 5.0 + 10 * 3.5
    assert Pace.of([6.0], [0.5], NOW) == pace


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_a_step_lasts_as_long_as_its_slowest_replica(num_replicas: int) -> None:
    """Within 3 % of the mean of the largest of normal deviates, drawn many times."""
    spread = 0.2
    drawn = NormalDist(1.0, spread).samples(20_000 * num_replicas, seed=3)
    largest = fmean(
        max(drawn[i : i + num_replicas]) for i in range(0, len(drawn), num_replicas)
    )
    pace = Pace(3.0, spread)
    found_s = pace.step_s(Stretch(0, num_replicas, 2.0))
    assert found_s == pytest.approx(3.0 * 2.0 * largest, rel=0.03)
    assert pace.step_s(NOW) == 3.0 * 2.0


def test_the_spread_of_the_measured_steps_is_that_of_a_normal_distribution() -> None:
    """Found again from replicas that wait for the slowest; so is their own pace."""
    steps_s = NormalDist(4.0, 0.4).samples(10_000, seed=1)
    pace = Pace.of(steps_s, [0.0, 0.0], NOW)
    assert pace.share == pytest.approx(2.0, rel=0.01)
    assert pace.spread == pytest.approx(0.1, rel=0.05)
    pair = Stretch(0, 2, 2.0)
    slowed = Pace.of(steps_s, [0.0, 0.0], pair)
    assert slowed.step_s(pair) == pytest.approx(pace.step_s(NOW))
    assert slowed.share < pace.share


def test_a_new_stretch_goes_on_at_the_pace_of_the_one_before() -> None:
    """Until four of its own steps behind the first are measured."""
    times = StepTimes()
    assert times.pace(NOW) is None
    times.add(4.0, 0.0)
    assert times.pace(NOW) == (2.0, 0.0, 0.0, 0.0)
    times.end(NOW)
    for _ in range(4):
        assert times.pace(LATER) == (2.0, 0.0, 0.0, 0.0)
        times.add(3.0, 0.0)
    times.add(3.0, 0.0)
    assert times.pace(LATER) == (3.0, 0.0, 0.0, 0.0)


def measured(times: StepTimes, first_s: float, others_s: float, number: int) -> None:
    """Add a first step, and so many others."""
    times.add(first_s, 0.0)
    for _ in range(number):
        times.add(others_s, 0.0)


def test_the_first_step_in_each_layout_is_longer() -> None:
    """As the last one measured; it is no part of the pace, however long ago it was.

    The first of a run does not count: it warms up more than those behind a change.
    """
    times = StepTimes()
    measured(times, 40.0, 4.0, 100)
    assert times.pace(NOW) == (2.0, 0.0, 0.0, 0.0)
    times.end(NOW)
    measured(times, 10.0, 4.0, 100)
    pace = times.pace(NOW)
    assert pace == (2.0, 0.0, 0.0, 6.0)
    same = Stretch(12, 1, 1.0)
    assert rest_s([NOW, LATER, same], 1, 20, pace) == 9 * 4.0 + 5.0 + 6.0 + 10 * 2.0
    times.end(NOW, is_change=False)
    measured(times, 3.0, 3.0, 5)
    assert times.pace(LATER) == (3.0, 0.0, 0.0, 6.0)
