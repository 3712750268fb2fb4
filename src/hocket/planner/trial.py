"""Trial runs of cuts, and what they predict for other cuts.

Layers that are measured one at a time do not disturb each other: their weights stay in
the caches, other workers are idle, the host does nothing in between. A trial includes
all that, for one cut and one size of microbatch:

    the same cut      ops take the trial's times
    another cut       layers take as much longer as they did in the nearest trial
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.planner.work import LayerCost


@dataclass(frozen=True, slots=True)
class Trial:
    """One cut that all workers ran for a few steps.

    Args:
        num_samples: samples of each microbatch.
        num_devices: the devices that shared the stages.
        boundaries: the layers at which stages 1, 2, ... begin.
        costs: the measured costs of its stages and messages.
    """

    num_samples: int
    num_devices: int
    boundaries: tuple[int, ...]
    costs: Costs

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.boundaries) + 1

    def is_of(
        self, num_samples: int, num_devices: int, boundaries: tuple[int, ...]
    ) -> bool:
        """Return whether it was this cut, on as many devices."""
        played = self.num_samples, self.num_devices, self.boundaries
        return played == (num_samples, num_devices, boundaries)


@dataclass(frozen=True, slots=True)
class MeasuredTrials:
    """All trials on the devices before planning for them.

    Args:
        cuts: the trials of cuts.
        ddp_s: what DistributedDataParallel over all devices adds to forward and
            backward of a step: reductions that are not hidden, and its own work.
    """

    cuts: tuple[Trial, ...] = ()
    ddp_s: float | None = None


NO_TRIALS: Final = MeasuredTrials()


@dataclass(frozen=True, slots=True)
class StageSlowdown:
    """The ratio of ops' times in place to the sum of their layers.

    Args:
        forward: the ratio for F.
        backward: the ratio for B.
        update: the ratio for U.
    """

    forward: float = 1.0
    backward: float = 1.0
    update: float = 1.0

    @classmethod
    def of(
        cls, in_place: Iterable[StageCost], stages: Iterable[StageCost]
    ) -> StageSlowdown:
        """Return the ratios of times in place to the sums of the same stages.

        Args:
            in_place: the stages' costs, measured while all workers ran them.
            stages: the same stages' costs as sums of layers.
        """
        played, added = _sums(in_place), _sums(stages)
        return cls(
            *(a / b if a and b else 1.0 for a, b in zip(played, added, strict=True))
        )

    def slowed(self, cost: StageCost) -> StageCost:
        """Return the stage's cost in place."""
        return replace(
            cost,
            forward_s=cost.forward_s * self.forward,
            input_grad_s=cost.input_grad_s * self.backward,
            weight_grad_s=cost.weight_grad_s * self.backward,
            update_s=cost.update_s * self.update,
            split_s=cost.split_s * self.backward,
        )

    def of_layer(self, cost: LayerCost) -> LayerCost:
        """Return the layer's cost in place."""
        return replace(
            cost,
            forward_s=cost.forward_s * self.forward,
            input_grad_s=cost.input_grad_s * self.backward,
            weight_grad_s=cost.weight_grad_s * self.backward,
            split_s=cost.split_s * self.backward,
        )


def nearest(
    trials: Sequence[Trial], num_samples: int, num_devices: int, num_stages: int
) -> Trial | None:
    """Return the trial that is most like a cut; None without trials.

    The microbatch's size matters more than the place of the cut.
    """

    def distance(trial: Trial) -> tuple[float, float, float]:
        return (
            abs(log(trial.num_samples / num_samples)),
            abs(log(trial.num_devices / num_devices)),
            abs(log(trial.num_stages / num_stages)),
        )

    return min(trials, key=distance, default=None)


def as_measured(cost: StageCost, played: StageCost) -> StageCost:
    """Return a stage's cost with the seconds of the same stage in the trial."""
    return replace(
        cost,
        forward_s=played.forward_s,
        input_grad_s=played.input_grad_s,
        weight_grad_s=played.weight_grad_s,
        update_s=played.update_s,
    )


def _sums(stages: Iterable[StageCost]) -> tuple[float, float, float]:
    known = tuple(stages)
    return (
        sum(cost.forward_s for cost in known),
        sum(cost.input_grad_s + cost.weight_grad_s for cost in known),
        sum(cost.update_s for cost in known),
    )
