"""Makes candidates' schedules, and reads from them where they place stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hocket.core.check import check
from hocket.core.costs import StageCost
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.timelines.arrays import Floats, Ints
from hocket.errors import ShapeError
from hocket.passes.merge_backward import merge_unneeded_splits
from hocket.planner.candidate import Candidate
from hocket.schedules import make_schedule

_FULL_STEPS: Final = 3  # and as many as there are devices: then a pipeline is full


@dataclass(frozen=True)
class Placement:
    """The devices, delays and versions of a schedule's stages.

    They do not depend on the number of microbatches.

    Args:
        schedule: one step, from as few microbatches as possible.
        name: the schedule's name.
        stages_per_device: the stages on each device.
    """

    schedule: Schedule
    name: str
    stages_per_device: int

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(stage.device for stage in self.schedule.program.stages)

    @property
    def splits(self) -> bool:
        """Whether it splits any backward."""
        return Kind.BACKWARD_INPUT in self.schedule.kinds

    @cached_property
    def takes_shards(self) -> bool:
        """Whether its stages can be sharded; see `add_gathers`."""
        order, program = self.schedule, self.schedule.program
        num_lanes = len(order.lanes)
        return not (self.delay or program.copies or num_lanes > program.num_devices)

    @cached_property
    def delay(self) -> int:
        """The largest delay of any stage."""
        return max(stage.delay for stage in self.schedule.program.stages)

    @cached_property
    def num_versions(self) -> tuple[int, ...]:
        """The versions of each stage's weights, in a pipeline that is full."""
        if not self.delay:
            return (1,) * len(self.devices)
        p = self.schedule.program.num_devices
        many = (p, 2 * p, 4 * p, 1)
        sizes = {"num_devices": p, "stages_per_device": self.stages_per_device}
        few = _first_of(many, self.name, num_steps=1, **sizes).program
        num_steps = _FULL_STEPS + -(-p // few.num_microbatches_of(0))
        full = _first_of(many, self.name, num_steps=num_steps, **sizes)
        return check(full).num_versions


def make_order(
    candidate: Candidate, placement: Placement, options: Mapping[str, Any]
) -> Schedule:
    """Return a candidate's schedule; backwards stay whole if no op waits for their I.

    It has one step; a flush-free order has enough steps to fill the pipeline.

    Args:
        candidate: the candidate.
        placement: its schedule's placement.
        options: further options of the schedule.

    Raises:
        ShapeError: the schedule does not take its numbers.
        FitError: no order fits the memory that the options name.
    """
    p, m = candidate.num_devices, candidate.num_microbatches
    schedule = make_schedule(
        candidate.schedule,
        num_devices=p,
        num_microbatches=m,
        num_replicas=candidate.num_replicas,
        stages_per_device=candidate.stages_per_device,
        num_steps=_FULL_STEPS + -(-p // m) if placement.delay else 1,
        **options,
    )
    return merge_unneeded_splits(schedule)


def placement_of(name: str, num_devices: int, stages_per_device: int) -> Placement:
    """Return a schedule's placement.

    Raises:
        ShapeError: the schedule does not take these numbers, or is no training of one
            model.
    """
    p = num_devices
    sizes = {"num_devices": p, "stages_per_device": stages_per_device}
    schedule = _first_of((1, p, 2 * p, 4 * p), name, num_steps=1, **sizes)
    program = schedule.program
    if not all(stage.trainable for stage in program.stages):
        raise ShapeError(f"{name} does not train all of its stages")
    if len(program.nets) > 1:
        raise ShapeError(f"{name} holds several nets: a plan is of one model")
    return Placement(schedule, name, stages_per_device)


def _first_of(choices: Sequence[int], name: str, **sizes: int) -> Schedule:
    """Return a schedule with the first number of microbatches that it takes."""
    for num_microbatches in choices:
        try:
            return make_schedule(name, num_microbatches=num_microbatches, **sizes)
        except ShapeError as error:
            refused = error
    raise refused


# A quick lower bound of a step, which decides what need not be simulated.
#
#     device d   │ fill │ m x (F + B) of all its stages │ drain │
#
# A device's first op is the forward of its first stage, which waits for all stages
# before; its last backward is that stage's, and all stages before follow. Where
# backwards are split, only its last I is followed so, and its W come when they will.
# With replicas, the stage whose backward is last is reduced and updated after it; and a
# device's reductions follow each other, the first one after all backwards of some
# stage. Sharded stages are gathered once at least, on the way of the reductions, and
# the first one before all else.
#
# `search/bound.py` is tighter, holds for any order, and takes longer.
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
        self,
        placement: Placement,
        num_microbatches: int,
        hop_s: float,
        reduce_s: Floats,
        gather_s: Floats,
        *,
        num_shards: int,
    ) -> float:
        """Return the least seconds of a step with stages placed so.

        Args:
            placement: the stages' devices.
            num_microbatches: microbatches per step.
            hop_s: seconds of a message from stage to stage.
            reduce_s: seconds of each stage's reduction.
            gather_s: seconds of one gather of each stage's weights.
            num_shards: the devices that update each stage together.
        """
        update_s = self._update_s / num_shards
        of = np.array(placement.devices)
        rings_s = np.bincount(of, reduce_s)
        if placement.delay:  # the pipeline is full: only work and reductions count
            least_s = self.work_s(placement, num_microbatches)
            return max(least_s, float(rings_s.max()))
        first = _least(np.arange(of.size, dtype=float), of).astype(np.int64)
        hops_s = np.concatenate(([0], np.cumsum(of[1:] != of[:-1])))[first] * hop_s
        fill_s = _before(self._forward_s)[first] + hops_s + gather_s[0]
        drain_s = _before(self._backward_s)[first] + hops_s
        stage_s = num_microbatches * (self._forward_s + self._backward_s)
        busy_s = np.bincount(of, stage_s)
        if placement.splits:
            last_s = num_microbatches * np.bincount(of, self._weight_grad_s)
            drain_s -= _before(self._weight_grad_s)[first] + last_s
        end_s = np.maximum(drain_s, np.bincount(of, update_s))
        end_s = np.maximum(end_s, _least(reduce_s + update_s, of))
        after_s = _least(stage_s, of) + rings_s + _least(update_s, of)
        rings_s += np.bincount(of, gather_s)
        worked_s = fill_s + np.maximum(busy_s + end_s, after_s)
        return float(np.maximum(worked_s, rings_s).max())

    def work_s(self, placement: Placement, num_microbatches: int) -> float:
        """Return the busiest device's work in a step."""
        of = np.array(placement.devices)
        work_s = num_microbatches * np.bincount(of, self._forward_s + self._backward_s)
        return float((work_s + np.bincount(of, self._update_s)).max())


def _before(stage_s: Floats) -> Floats:
    """Return the sum over all stages before each."""
    return np.array([0.0, *accumulate(stage_s.tolist())])


def _least(stage_s: Floats, of: Ints) -> Floats:
    """Return the least of each device's stages."""
    least_s = np.full(int(of.max()) + 1, np.inf)
    np.minimum.at(least_s, of, stage_s)
    return least_s
