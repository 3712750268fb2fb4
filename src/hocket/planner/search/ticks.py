"""Converts seconds to whole numbers for CP-SAT."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import floor, lcm
from typing import Final

_MOST: Final = 10**8  # ticks of all work together; then their products fit 64 bits
_MOST_PARTS: Final = 1000  # of the longest time, in which simple times are counted
_NEAR: Final = 1e-6  # of a tick, lost in floating point


@dataclass(frozen=True, slots=True)
class Ticks:
    """A unit of time in which everything is whole, or is rounded down.

    Rounded down, no order becomes impossible and none takes longer, so that a bound in
    ticks is a bound in seconds.

    Args:
        tick_s: seconds of a tick.
    """

    tick_s: float

    @classmethod
    def of(cls, seconds: Iterable[float], total_s: float) -> Ticks:
        """Return the largest tick in which all times are whole, or a fine one.

        Args:
            seconds: times that are to be whole.
            total_s: the longest time.

        >>> Ticks.of([1.0, 0.5, 0.3], 100.0)
        Ticks(tick_s=0.1)
        """
        times = {time for time in seconds if time > 0}
        if not times:
            return cls(1.0)
        longest = max(times)
        parts = [
            Fraction(time / longest).limit_denominator(_MOST_PARTS) for time in times
        ]
        is_simple = all(
            abs(float(part) * longest - time) < _NEAR * time
            for part, time in zip(parts, times, strict=True)
        )
        tick_s = longest / lcm(*(part.denominator for part in parts))
        if is_simple and total_s < _MOST * tick_s:
            return cls(tick_s)
        return cls(max(total_s, longest) / _MOST)

    def count(self, seconds: float) -> int:
        """Return whole ticks, rounded down."""
        return floor(seconds / self.tick_s + _NEAR)
