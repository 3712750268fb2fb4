"""Checks that an argument of any type is a number; a bool is none."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer, no bool, and at least `least`.

    >>> [is_whole(value, 1) for value in (2, 0, 1.0, "2", True)]
    [True, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= least


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number (int, float, Fraction, NaN), no bool.

    >>> [is_real(value) for value in (2, 0.5, "0.5", True)]
    [True, True, False, False]
    """
    return not isinstance(value, bool) and isinstance(value, Real)
