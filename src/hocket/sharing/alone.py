"""What a job's iterations take alone: a mean for each kind of iteration.

    training    ▁▁▁███ ▁▁▁███        ▁▁▁███       one kind: one mean
    evaluation                ▁▁ ▁▁               another kind: another mean

The mean, since it is multiplied by a number of iterations: where they are uneven, the
minimum or the median would give another total.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan


@dataclass(slots=True)
class KindTimes:
    """The iterations of one kind.

    Args:
        rough_s: an inexact time (of a forecast, of an iteration that warmed up, or of
            one whose memory was logged); used until an exact one is known.
        num_alone: iterations that ran alone, without the rough ones.
        alone_s: the sum of their seconds, without waits at gates before they began.
        alone_spent_s: the sum of their seconds, with waits at gates.
        num_beside: iterations during which another job ran.
        spent_s: the sum of their seconds, with the time at their gates.
        num_ended: all that ended, rough ones too.
    """

    rough_s: float = nan
    num_alone: int = 0
    alone_s: float = 0.0
    alone_spent_s: float = 0.0
    num_beside: int = 0
    spent_s: float = 0.0
    num_ended: int = 0

    @property
    def mean_s(self) -> float:
        """Return the mean seconds of an iteration alone; nan if unknown."""
        return self.alone_s / self.num_alone if self.num_alone else self.rough_s

    def ran_beside(self, spent_s: float) -> None:
        """Count an iteration beside another job, with the time at its gates."""
        self.num_ended += 1
        self.num_beside += 1
        self.spent_s += spent_s

    def ran_alone(self, seconds: float, spent_s: float, *, is_rough: bool) -> None:
        """Count an iteration that ran alone.

        It is rough where `is_rough` says so, or where nothing is known of its kind.
        """
        self.num_ended += 1
        if is_rough or isnan(self.rough_s):
            self.rough_s = seconds
        else:
            self.num_alone += 1
            self.alone_s += seconds
            self.alone_spent_s += spent_s


def mean_alone_s(kinds: Iterable[KindTimes]) -> float:
    """Return the mean seconds alone of the iterations that ended; nan if unknown."""
    known = [x for x in kinds if x.num_ended and not isnan(x.mean_s)]
    if not known:
        return nan
    return sum(x.num_ended * x.mean_s for x in known) / sum(x.num_ended for x in known)


def slowdown(kinds: Iterable[KindTimes], unfinished_s: float) -> float:
    """Return a job's time divided by the time of the same iterations alone.

    An iteration that ran alone was delayed only at its gates. One beside another job is
    compared with the mean of its kind. Rough iterations that ran alone are left out.

    Args:
        kinds: the times of the job's iterations, by kind.
        unfinished_s: the time so far of the iteration that has not ended.

    Returns:
        1 if no time alone is known.
    """
    alone_s, spent_s = 0.0, unfinished_s
    for x in kinds:
        alone_s += x.alone_s
        spent_s += x.alone_spent_s
        if x.num_beside and not isnan(x.mean_s):
            alone_s += x.num_beside * x.mean_s
            spent_s += x.spent_s
    return spent_s / alone_s if alone_s > 0 else 1.0
