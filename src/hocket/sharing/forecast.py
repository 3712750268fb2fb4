"""Memory over one iteration of a job, and the first moment at which jobs fit together.

    bytes         ┌──┐
               ┌──┘  └──┐                 an iteration: forward allocates,
    ───────────┘ forward └── backward     backward releases
               0    forward_s       seconds

Source: Zico (Lim et al., ATC 2021), section 4.3: an iteration is delayed as a whole,
never a part of it, by the least time after which the sum stays within the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, nan
from typing import Final

import numpy as np

from hocket.core.timelines.memory import MemoryCurve

ALMOST_S: Final = 1e-9  # two moments closer than this are one
_NUM_LEVELS: Final = 32  # of a curve that is compared with others


@dataclass(frozen=True, eq=False)
class Forecast:
    """What one iteration of a job is expected to be.

    Args:
        forward_s: the seconds from its start to the start of its backward.
        backward_s: the seconds from there to its end, the update included.
        recorded: the bytes beyond those that the job holds between iterations; from the
            start of an iteration, and 0 at its end.
        recorded_s: `forward_s` and `backward_s` of that iteration, if they were others.
    """

    forward_s: float
    backward_s: float
    recorded: MemoryCurve
    recorded_s: tuple[float, float] | None = None

    @cached_property
    def curve(self) -> MemoryCurve:
        """The bytes of an iteration of these durations."""
        if self.recorded_s is None:
            return self.recorded
        before_s, after_s = self.recorded_s
        times = self.recorded.time_s
        ahead = self.forward_s / before_s if before_s > 0 else 0.0
        behind = self.backward_s / after_s if after_s > 0 else 0.0
        moved = np.where(
            times <= before_s,
            times * ahead,
            self.forward_s + (times - before_s) * behind,
        )
        moved[-1] = self.seconds
        return MemoryCurve(moved, self.recorded.amount)

    @property
    def seconds(self) -> float:
        """The seconds of the iteration."""
        return self.forward_s + self.backward_s

    @classmethod
    def of_changes(
        cls,
        forward_s: float,
        backward_s: float,
        time_s: Sequence[float],
        change_bytes: Sequence[float],
    ) -> Forecast:
        """Make a forecast of at most 32 levels that nowhere is below the changes.

        Args:
            forward_s: see `Forecast`.
            backward_s: see `Forecast`.
            time_s: when bytes change, from the start of the iteration.
            change_bytes: by how much, more or less than 0.
        """
        whole = MemoryCurve.of_changes(
            np.array(time_s, float), np.array(change_bytes, float)
        )
        end_s = forward_s + backward_s
        kept = whole.time_s < end_s
        curve = MemoryCurve(
            np.append(whole.time_s[kept], end_s),
            np.append(np.maximum(whole.amount[kept], 0.0), 0.0),
        )
        return cls(forward_s, backward_s, curve)._coarser()

    def _coarser(self) -> Forecast:
        """Return it with at most 32 levels, none below the bytes."""
        times, amounts = self.curve.time_s[:-1], self.curve.amount[:-1]
        if times.size <= _NUM_LEVELS:
            return self
        edges = np.linspace(0.0, self.seconds, _NUM_LEVELS + 1)[:-1]
        first = np.maximum(np.searchsorted(times, edges, side="right") - 1, 0)
        last = np.append(np.searchsorted(times, edges[1:], side="left"), times.size)
        pairs = zip(first, last, strict=True)
        highest = [amounts[i : max(j, i + 1)].max() for i, j in pairs]
        curve = MemoryCurve(np.append(edges, self.seconds), np.array([*highest, 0.0]))
        return Forecast(self.forward_s, self.backward_s, curve)

    def retimed(self, forward_s: float, backward_s: float) -> Forecast:
        """Return the same bytes for an iteration of other durations."""
        before = self.recorded_s or (self.forward_s, self.backward_s)
        return Forecast(forward_s, backward_s, self.recorded, before)


def summed(placed: Sequence[tuple[float, MemoryCurve]]) -> MemoryCurve:
    """Add up curves, each moved to the moment at which its iteration starts."""
    if not placed:
        return MemoryCurve(np.zeros(1), np.zeros(1))
    times = np.concatenate([start + curve.time_s for start, curve in placed])
    changes = [np.diff(curve.amount, prepend=0.0) for _, curve in placed]
    order = np.argsort(times, kind="stable")
    return MemoryCurve(times[order], np.cumsum(np.concatenate(changes)[order]))


def earliest_start_s(
    curve: MemoryCurve,
    beside: MemoryCurve,
    limit_bytes: float,
    from_s: float,
    error_s: float = 0.0,
) -> float:
    """Return the first moment from which the sum of both stays within a limit.

    A level of `curve` and one of `beside` whose sum is too high must not overlap: each
    such pair forbids an interval of starts.

    Args:
        curve: starts at the moment that is returned; alone, it is within the limit.
        beside: in absolute time.
        limit_bytes: the most that both may be.
        from_s: the earliest moment allowed.
        error_s: levels whose sum is too high stay this far apart: either may be late.
    """
    gap_s = max(error_s, ALMOST_S)
    own, other = curve.amount[:-1, None], beside.amount[None, :]
    begins, ends = curve.time_s[:-1, None], curve.time_s[1:, None]
    until = np.append(beside.time_s[1:], np.inf)[None, :]
    too_much = (own + other > limit_bytes) & (own > 0) & (other > 0)
    low = (beside.time_s[None, :] - ends)[too_much] - gap_s
    high = (until - begins)[too_much] + gap_s
    start_s = from_s
    for i in np.argsort(low, kind="stable"):
        if low[i] < start_s < high[i]:
            start_s = float(high[i])
    return start_s


# What a job's iterations take alone: a mean for each kind of iteration.
#
#     training    ▁▁▁███ ▁▁▁███        ▁▁▁███       one kind: one mean
#     evaluation                ▁▁ ▁▁               another kind: another mean
#
# The mean, since it is multiplied by a number of iterations: where they are uneven, the
# minimum or the median would give another total.
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
