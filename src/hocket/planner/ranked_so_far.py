"""The outcomes that a ranking has simulated so far, and their order."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from math import inf
from typing import Final

from hocket.planner.candidate import DATA_PARALLEL, Candidate, Outcome

_DIGITS: Final = 6  # of samples per second that are compared; equal in all six is a tie
_ROUNDED: Final = 1 - 1e-5  # slack: rounding never drops a candidate that could tie


@dataclass(slots=True)
class RankedSoFar:
    """The outcomes that were simulated so far.

    Args:
        num_best: outcomes that must be the best there are.
        outcomes: all of them.
        best_s: the shortest steps of those that fit, ascending.
        best_of: the shortest step that fits, by schedule.
        num_beaten: candidates that cannot be among the best.
        num_too_long: candidates with too many ops.
    """

    num_best: int
    outcomes: list[Outcome] = field(default_factory=list)
    best_s: list[float] = field(default_factory=list)
    best_of: dict[str, float] = field(default_factory=dict)
    num_beaten: int = 0
    num_too_long: int = 0

    def is_beaten(self, bound_s: float, candidate: Candidate) -> bool:
        """Return whether it can be neither among the best, nor its schedule's best."""
        least_s = bound_s * _ROUNDED
        if len(self.best_s) < self.num_best or least_s <= self.best_s[-1]:
            return False
        return least_s > self.best_of.get(candidate.schedule, inf)

    def add(self, outcome: Outcome | None) -> None:
        """Add an outcome; None if the schedule refused these stages or microbatches."""
        if outcome is None:
            return
        self.outcomes.append(outcome)
        if outcome.fits:
            insort(self.best_s, outcome.step_s)
            del self.best_s[self.num_best :]
            name = outcome.candidate.schedule
            known = self.best_of.get(name, outcome.step_s)
            self.best_of[name] = min(known, outcome.step_s)


def order(outcome: Outcome) -> tuple[float | Candidate, ...]:
    """Sort key: fitting ones first by time, then the others by missing memory.

    Of equals the simpler: plain data parallelism with the least sharding, then fewer
    devices per replica, no recomputation, less memory.
    """
    candidate = outcome.candidate
    if not outcome.fits:
        return 1, outcome.missing_bytes, candidate
    return (
        0,
        -float(f"{outcome.samples_per_s:.{_DIGITS}g}"),
        _SIMPLICITY.get(candidate.schedule, len(_SIMPLICITY)),
        candidate.num_devices,
        candidate.recomputes,
        outcome.peak_bytes,
        candidate,
    )


_SIMPLICITY: Final = {name: place for place, name in enumerate(DATA_PARALLEL)}
