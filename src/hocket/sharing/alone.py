"""What a job's iterations take alone: a mean for each kind of iteration.

    training    ▁▁▁███ ▁▁▁███        ▁▁▁███       seconds that are comparable
    evaluation                ▁▁ ▁▁               seconds of another kind

A mean, as what is shared is a sum: where iterations are uneven, the shortest one, or
the median, is another one than those that follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan


@dataclass(slots=True)
class KindTimes:
    """The iterations of one kind.

    Args:
        rough_s: the seconds of one that warms up, or was watched, or a forecast's: the
            mean until another one has run alone.
        num_alone: those that ran alone, and are not rough.
        alone_s: the sum of their seconds.
        alone_spent_s: the same, with the time at their gates.
        num_beside: those beside another job.
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
        """Count an iteration without another job beside it; the first one warms up."""
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


def slowdown(kinds: Iterable[KindTimes], more_s: float) -> float:
    """Return the time of iterations over that of the same ones alone; 1 if unknown.

    One that ran alone is compared with itself: only its gates were a delay. Others are
    compared with the mean of their kind, and rough ones do not count.

    Args:
        kinds: the job's.
        more_s: the time of an iteration that has not ended.
    """
    alone_s, spent_s = 0.0, more_s
    for x in kinds:
        alone_s += x.alone_s
        spent_s += x.alone_spent_s
        if x.num_beside and not isnan(x.mean_s):
            alone_s += x.num_beside * x.mean_s
            spent_s += x.spent_s
    return spent_s / alone_s if alone_s > 0 else 1.0
