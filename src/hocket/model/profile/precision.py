"""Says when a measurement has been repeated often enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import hypot, sqrt
from statistics import median, quantiles
from typing import Final

_LEAST: Final = 10  # measurements
_EVERY: Final = 5  # check again after every 5
_SHARE: Final = 0.02
_NOTCH: Final = 1.57


def is_precise(columns: Sequence[Sequence[float]]) -> bool:
    """Return whether the sum of the medians is known within 2 %.

    Half the 95 % confidence interval of a median is 1.57 quartile ranges by the root of
    the number of measurements; those of several medians add up as squares do.

    Args:
        columns: the seconds of several things, each measured several times; things that
            share their measurements have the same column.

    Source: McGill, Tukey and Larsen, "Variations of Box Plots", 1978.
    """
    num = min(map(len, columns))
    if num < _LEAST or num % _EVERY:
        return False
    counts = Counter(map(id, columns))
    halves_s = [
        counts[id(column)] * _NOTCH / sqrt(len(column)) * quartile_range(column)
        for column in {id(column): column for column in columns}.values()
    ]
    return hypot(*halves_s) <= _SHARE * sum(map(median, columns))


def quartile_range(seconds: Sequence[float]) -> float:
    """Return the difference of the upper and the lower quartile."""
    low, _, high = quantiles(seconds, n=4)
    return high - low
