"""What a cut took when its stages were played, and what that says of others.

Layers that are measured one at a time know nothing of each other: their weights stay
in the caches, no worker disturbs another, the host does nothing in between. A trial
knows all that, of one cut and one size of microbatch:

    the same cut      ops take what they took in the trial
    another cut       layers take as much longer as they did in the nearest trial
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Final

from hocket.core.costs import Costs, StageCost


@dataclass(frozen=True, slots=True)
class Trial:
    """One cut that was played by all workers, a few steps.

    Args:
        num_samples: in each microbatch.
        num_devices: that shared the stages.
        boundaries: the layers at which stages 1, 2, ... begin.
        costs: of its stages and messages, as they were measured.
    """

    num_samples: int
    num_devices: int
    boundaries: tuple[int, ...]
    costs: Costs

    @property
    def num_stages(self) -> int:
        """That were played."""
        return len(self.boundaries) + 1

    def is_of(
        self, num_samples: int, num_devices: int, boundaries: tuple[int, ...]
    ) -> bool:
        """Whether it was this cut, on as many devices, that was played."""
        played = self.num_samples, self.num_devices, self.boundaries
        return played == (num_samples, num_devices, boundaries)


@dataclass(frozen=True, slots=True)
class MeasuredTrials:
    """All that was tried out on the devices before planning for them.

    Args:
        cuts: that were played.
        ddp_s: of a step, what DistributedDataParallel over all devices adds to forward
            and backward: reductions, as far as nothing hides them, and its own work.
    """

    cuts: tuple[Trial, ...] = ()
    ddp_s: float | None = None


NO_TRIALS: Final = MeasuredTrials()


@dataclass(frozen=True, slots=True)
class StageSlowdown:
    """How much longer ops take than the sum of their layers.

    Args:
        forward: of F.
        backward: of B.
        update: of U.
    """

    forward: float = 1.0
    backward: float = 1.0
    update: float = 1.0

    @classmethod
    def of(cls, trial: Trial, stages: Iterable[StageCost]) -> StageSlowdown:
        """From what was played to what the same stages add up to.

        Args:
            trial: what was played.
            stages: the same, added up from layers.
        """
        played, added = _sums(trial.costs.stages), _sums(stages)
        return cls(
            *(a / b if a and b else 1.0 for a, b in zip(played, added, strict=True))
        )

    def slowed(self, cost: StageCost) -> StageCost:
        """The stage's cost, in place."""
        return replace(
            cost,
            forward_s=cost.forward_s * self.forward,
            input_grad_s=cost.input_grad_s * self.backward,
            weight_grad_s=cost.weight_grad_s * self.backward,
            update_s=cost.update_s * self.update,
            split_s=cost.split_s * self.backward,
        )


def nearest(
    trials: Sequence[Trial], num_samples: int, num_devices: int, num_stages: int
) -> Trial | None:
    """The trial that says most of a cut; None where nothing was played.

    What a microbatch's size changes counts more than where it is cut.
    """

    def distance(trial: Trial) -> tuple[float, float, float]:
        return (
            abs(log(trial.num_samples / num_samples)),
            abs(log(trial.num_devices / num_devices)),
            abs(log(trial.num_stages / num_stages)),
        )

    return min(trials, key=distance, default=None)


def as_measured(cost: StageCost, played: StageCost) -> StageCost:
    """A stage's cost, with the seconds of the same stage when it was played."""
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
