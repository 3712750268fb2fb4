"""Costs of a model's cuts: layers, balanced boundaries, stages; as measured in trials.

num_samples ─▶ layers ─▶ boundaries ─▶ stage costs
               trials ─▶ measured in place ───┘
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hocket.core.costs import Costs, Link, StageCost
from hocket.planner.balance import Balancer
from hocket.planner.quick_bound import StageSums
from hocket.planner.stages import stage_costs
from hocket.planner.trial import (
    MeasuredTrials,
    StageSlowdown,
    as_measured,
    nearest,
)
from hocket.planner.work import ModelCosts


class CutCosts:
    """The costs of one model's layers and stages; they do not depend on the batch.

    Args:
        work: the model's costs.
        trials: the measured trials on these devices.
        hop: the link between adjacent devices.

    Attributes:
        layers: returns the layers' costs for microbatches of a size; cached.
        sums: returns the sums over the stages of the balanced cut; cached.
    """

    def __init__(self, work: ModelCosts, trials: MeasuredTrials, hop: Link) -> None:
        """Make empty caches."""
        self.work = work
        self._hop = hop
        self.trials = trials
        self.layers = cache(work.layers)
        self._balancer = cache(self._make_balancer)
        self.sums = cache(self._make_sums)

    def boundaries(self, num_samples: int, num_stages: int) -> tuple[int, ...]:
        """Return the balanced cut.

        Raises:
            ShapeError: there are fewer layers than stages.
        """
        return self._balancer(num_samples).cut(num_stages)

    def stage_costs(
        self,
        num_samples: int,
        num_devices: int,
        boundaries: tuple[int, ...],
        *,
        recomputes: bool,
    ) -> tuple[StageCost, ...]:
        """Return the costs of stages that are cut here.

        Args:
            num_samples: samples of each microbatch.
            num_devices: the devices that share the stages.
            boundaries: the layers at which stages 1, 2, ... begin.
            recomputes: whether the stages keep only their inputs.
        """
        stages = self._added(num_samples, boundaries, recomputes)
        trial = nearest(self.trials.cuts, num_samples, num_devices, len(stages))
        if trial is None:
            return stages
        if trial.is_of(num_samples, num_devices, boundaries):
            return tuple(map(as_measured, stages, trial.costs.stages))
        same = self._added(trial.num_samples, trial.boundaries, False)
        return tuple(map(StageSlowdown.of(trial.costs.stages, same).slowed, stages))

    def in_place(
        self, num_samples: int, num_devices: int, num_stages: int, link: Link
    ) -> Costs:
        """Return the costs of messages as the nearest trial measured them.

        Args:
            num_samples: samples of each microbatch.
            num_devices: the devices that share the stages.
            num_stages: the stages.
            link: the link between two devices, if no trial had messages.
        """
        trial = nearest(self.trials.cuts, num_samples, num_devices, num_stages)
        if trial is None:
            return Costs((), link=link)
        return (
            replace(trial.costs, link=link) if trial.num_devices == 1 else trial.costs
        )

    def _make_balancer(self, num_samples: int) -> Balancer:
        return Balancer.of(self.layers(num_samples), self._hop)

    def _make_sums(
        self, num_samples: int, num_devices: int, num_stages: int, recomputes: bool
    ) -> StageSums:
        """Return the sums; raises ShapeError if there are fewer layers than stages."""
        boundaries = self.boundaries(num_samples, num_stages)
        costs = self.stage_costs(
            num_samples, num_devices, boundaries, recomputes=recomputes
        )
        return StageSums(costs)

    def _added(
        self, num_samples: int, boundaries: tuple[int, ...], recomputes: bool
    ) -> tuple[StageCost, ...]:
        """Return stages as sums of layers."""
        return stage_costs(
            self.layers(num_samples),
            boundaries,
            recomputes=recomputes,
            update_s_per_byte=self.work.update_s_per_byte,
        )
