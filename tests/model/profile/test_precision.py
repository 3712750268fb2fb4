"""Measurements are repeated until their medians are known."""

from __future__ import annotations

import random
from statistics import median

from hocket.model.profile.precision import is_precise, quartile_range


def column(mean_s: float, spread: float, num: int, seed: int = 0) -> list[float]:
    """Seconds with a normal distribution."""
    draw = random.Random(seed)
    return [draw.gauss(mean_s, mean_s * spread) for _ in range(num)]


def test_more_measurements_know_a_median_better() -> None:
    """Ten are the least; a wide spread takes more."""
    assert not is_precise([column(1.0, 0.0, 9)])
    assert is_precise([column(1.0, 0.0, 10)])
    assert not is_precise([column(1.0, 0.1, 10)])
    assert is_precise([column(1.0, 0.1, 500)])


def test_many_things_are_known_better_than_each() -> None:
    """Their errors are not the same, unless they share their measurements."""
    own = [column(1.0, 0.05, 20, seed) for seed in range(30)]
    assert is_precise(own)
    assert not is_precise(own[:1])
    assert not is_precise([own[0]] * 30)


def test_the_interval_holds_the_median() -> None:
    """In 95 of 100 cases, of which 90 are asked for here."""
    held = 0
    for seed in range(200):
        seconds = column(1.0, 0.1, 40, seed)
        half_s = 1.57 * quartile_range(seconds) / 40**0.5
        held += abs(median(seconds) - 1.0) <= half_s
    assert held >= 180
