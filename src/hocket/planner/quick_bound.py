"""A quick lower bound of a step, which decides what need not be simulated.

    device d   │ fill │ m x (F + B) of all its stages │ drain │

A device's first op is the forward of its first stage, which waits for all stages
before; its last backward is that stage's, and all stages before follow. Where backwards
are split, only its last I is followed so, and its W come when they will.

`search/bound.py` is tighter, holds for any order, and takes longer.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import numpy as np

from hocket.core.costs import StageCost
from hocket.core.op import Kind
from hocket.core.timelines.arrays import Floats, Ints
from hocket.planner.orders import Placement


class StageSums:
    """Sums of all stages' costs, shared by all candidates that have these stages.

    Args:
        costs: the cost of each stage.
    """

    def __init__(self, costs: tuple[StageCost, ...]) -> None:
        """Add up the costs before each stage."""
        self.costs = costs
        self._forward_s = np.array([cost.forward_s for cost in costs])
        self._backward_s = np.array([cost.seconds(Kind.BACKWARD) for cost in costs])
        self._weight_grad_s = np.array([cost.weight_grad_s for cost in costs])
        self._update_s = np.array([cost.update_s for cost in costs])

    @cached_property
    def least_message_bytes(self) -> int:
        """The smallest message between adjacent stages, there and back."""
        there = (cost.output_bytes for cost in self.costs[:-1])
        back = (cost.input_grad_bytes for cost in self.costs[1:])
        return min((*there, *back), default=0)

    def bound_s(
        self, placement: Placement, num_microbatches: int, hop_s: float
    ) -> float:
        """Return the least seconds of a step with stages placed so.

        Args:
            placement: the stages' devices.
            num_microbatches: microbatches per step.
            hop_s: seconds of a message from stage to stage.
        """
        of = np.array(placement.devices)
        if placement.delay:  # the pipeline is full: only work counts
            return self.work_s(placement, num_microbatches)
        num_devices = int(of.max()) + 1
        first = np.full(num_devices, of.size)
        np.minimum.at(first, of, np.arange(of.size))
        hops_s = np.concatenate(([0], np.cumsum(of[1:] != of[:-1])))[first] * hop_s
        fill_s = _before(self._forward_s)[first] + hops_s
        drain_s = _before(self._backward_s)[first] + hops_s
        update_s = _per_device(self._update_s, of)
        work_s = num_microbatches * _per_device(self._forward_s + self._backward_s, of)
        if not placement.splits:
            bounds = work_s + np.maximum(fill_s + drain_s, update_s)
            return float(bounds.max())
        last_s = num_microbatches * _per_device(self._weight_grad_s, of)
        drain_s -= _before(self._weight_grad_s)[first]
        bounds = fill_s + work_s + np.maximum(drain_s - last_s, update_s)
        return float(bounds.max())

    def work_s(self, placement: Placement, num_microbatches: int) -> float:
        """Return the busiest device's work in a step."""
        of = np.array(placement.devices)
        work_s = num_microbatches * _per_device(self._forward_s + self._backward_s, of)
        return float((work_s + _per_device(self._update_s, of)).max())


def _before(stage_s: Floats) -> Floats:
    """Return the sum over all stages before each."""
    return np.array([0.0, *accumulate(stage_s.tolist())])


def _per_device(stage_s: Floats, of: Ints) -> Floats:
    """Return the sum over each device's stages."""
    total_s = np.zeros(int(of.max()) + 1)
    np.add.at(total_s, of, stage_s)
    return total_s
