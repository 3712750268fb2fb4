"""The result of a search, and its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hocket.core.schedule import Schedule

SAME: Final = 1e-4  # what rounding to whole ticks may hide, as a share


def gap(makespan_s: float, bound_s: float) -> float:
    """Return the share by which a makespan is longer than a bound; at least 0."""
    return max(0.0, makespan_s / bound_s - 1.0) if bound_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """The progress of a search.

    Args:
        elapsed_s: seconds since it began.
        makespan_s: the makespan of the best order so far; infinite while there is none.
        bound_s: no order is faster.
    """

    elapsed_s: float
    makespan_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The share by which the best order may be too long."""
        return gap(self.makespan_s, self.bound_s)


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best order that was found, and a bound on all others.

    Args:
        schedule: the order.
        makespan_s: its simulated makespan.
        bound_s: no order of the program that fits the memory is faster.
        elapsed_s: the seconds of the search.
    """

    schedule: Schedule
    makespan_s: float
    bound_s: float
    elapsed_s: float

    @property
    def gap(self) -> float:
        """The share by which the order may be longer than the best."""
        return gap(self.makespan_s, self.bound_s)

    @property
    def is_optimal(self) -> bool:
        """Whether no order is faster, up to rounding."""
        return self.gap <= SAME
