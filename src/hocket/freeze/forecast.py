"""Predicts how long the rest of a run takes, while its layers go on freezing.

    now ├ 2x1, 3 frozen ┤├ change ┤├ 1x2, 5 frozen ┤ ...

Each stretch has a simulated step. Later steps are predicted to be slower than simulated
by the factor measured so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, quantiles
from typing import Final, NamedTuple

_NORMAL: Final = NormalDist()
# The quartiles of a normal are this many deviations apart.
_QUARTILES: Final = 2 * _NORMAL.inv_cdf(0.75)
_FEWEST: Final = 4  # steps of which quartiles say something
_NUM_LATEST: Final = 50


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in one layout.

    Args:
        begin: the number of the first.
        num_replicas: copies of the pipeline.
        step_s: simulated seconds of a step.
        change_s: predicted seconds of the change of the layout before it; None where
            the layout stays.
    """

    begin: int
    num_replicas: int
    step_s: float
    change_s: float | None = None


class Pace(NamedTuple):
    """What steps take relative to the simulation.

    Args:
        share: measured seconds of one replica's step over the simulated ones.
        spread: the standard deviation of a step, divided by its mean.
        beside_s: seconds of a step outside its schedule, such as splitting the batch.
        first_s: by how much the first step in a layout is longer than the others.
    """

    share: float = 1.0
    spread: float = 0.0
    beside_s: float = 0.0
    first_s: float = 0.0

    @classmethod
    def of(
        cls, measured_s: Sequence[float], beside_s: Sequence[float], stretch: Stretch
    ) -> Pace:
        """Fit the pace to measured steps; the first one, which warms up, is left out.

        Args:
            measured_s: seconds of at least one step of a stretch.
            beside_s: the seconds of each outside of its order.
            stretch: what was simulated of them.
        """
        own_s = measured_s[1:] or measured_s
        mean_s, spread, first_s = fmean(own_s), 0.0, 0.0
        if len(own_s) >= _FEWEST:
            low_s, _, high_s = quantiles(own_s, n=4)
            spread = (high_s - low_s) / _QUARTILES / mean_s
            first_s = max(0.0, measured_s[0] - mean_s)
        alone_s = mean_s / _slowest(stretch.num_replicas, spread)
        beside_s = beside_s[1:] or beside_s
        return cls(alone_s / stretch.step_s, spread, fmean(beside_s), first_s)

    def step_s(self, stretch: Stretch) -> float:
        """Return the predicted seconds of a step: those of its slowest replica."""
        slowest = _slowest(stretch.num_replicas, self.spread)
        return self.beside_s + self.share * slowest * stretch.step_s


def _latest() -> deque[tuple[float, float]]:
    return deque(maxlen=_NUM_LATEST)


@dataclass(slots=True)
class StepTimes:
    """The first and the last measured steps of a stretch, and the pace before it."""

    _first: list[tuple[float, float]] = field(default_factory=list)
    _measured: deque[tuple[float, float]] = field(default_factory=_latest)
    _before: Pace | None = None
    _is_new: bool = False  # whether a change of layout began this stretch

    def add(self, measured_s: float, beside_s: float) -> None:
        """Add a step.

        Args:
            measured_s: the seconds of its schedule.
            beside_s: its seconds outside the schedule, such as splitting its batch.
        """
        steps = self._measured if self._first else self._first
        steps.append((measured_s, beside_s))

    def pace(self, stretch: Stretch) -> Pace | None:
        """Return the pace of the present stretch, or the last known; None: unknown."""
        steps = [*self._first, *self._measured]
        is_known = len(self._measured) >= _FEWEST or self._before is None
        if not is_known or not steps:
            return self._before
        measured_s, beside_s = ([x[i] for x in steps] for i in range(2))
        found = Pace.of(measured_s, beside_s, stretch)
        if self._is_new:
            return found
        # The first step of a run warms up longer than the first one after a change.
        return found._replace(first_s=self._before.first_s if self._before else 0.0)

    def end(self, stretch: Stretch, *, is_change: bool = True) -> None:
        """Go on to another stretch.

        Args:
            stretch: the one that ends.
            is_change: whether the layout changes, and not only its simulated seconds.
        """
        self._before, self._is_new = self.pace(stretch), is_change
        self._first.clear()
        self._measured.clear()


def rest_s(
    stretches: Sequence[Stretch], step: int, num_steps: int, pace: Pace
) -> float:
    """Return the predicted seconds from a step to the end of a run.

    Args:
        stretches: in order; the first has begun.
        step: the number of the next step.
        num_steps: the steps of the whole run.
        pace: what measured steps take relative to the simulation.
    """
    ends = [*(x.begin for x in stretches[1:]), num_steps]
    total_s = 0.0
    for stretch, end in zip(stretches, ends, strict=False):  # no stretch may be left
        num_left = max(0, min(end, num_steps) - max(stretch.begin, step))
        total_s += num_left * pace.step_s(stretch)
        if num_left and stretch.change_s is not None:
            total_s += stretch.change_s + pace.first_s
    return total_s


def _slowest(num_replicas: int, spread: float) -> float:
    """Return the expected maximum of one normal deviate per replica, of mean 1.

    Source: Blom, "Statistical Estimates and Transformed Beta-Variables" (1958).
    """
    rank = (num_replicas - 0.375) / (num_replicas + 0.25)
    return 1.0 + spread * _NORMAL.inv_cdf(rank)
