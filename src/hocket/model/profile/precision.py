"""Says when a measurement has been repeated often enough."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median, quantiles
from typing import Final

_LEAST: Final = 10  # measurements
_EVERY: Final = 5  # check again after every 5
_SHARE: Final = 0.02
_NOTCH: Final = 1.57


def is_precise(columns: Sequence[Sequence[float]]) -> bool:
    """Return whether the medians are known within 2 %, all together.

    Half the 95 % confidence interval of a median is 1.57 quartile ranges by the root of
    the number of measurements.

    Args:
        columns: the seconds of several things, each measured several times.

    Source: McGill, Tukey and Larsen, "Variations of Box Plots", 1978.
    """
    num = min(map(len, columns))
    if num < _LEAST or num % _EVERY:
        return False
    half_s = sum(_NOTCH / sqrt(len(x)) * quartile_range(x) for x in columns)
    return half_s <= _SHARE * sum(map(median, columns))


def quartile_range(seconds: Sequence[float]) -> float:
    """Return the difference of the upper and the lower quartile."""
    low, _, high = quantiles(seconds, n=4)
    return high - low
