"""Makes candidates' schedules, and reads from them where they place stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hocket.core.check import check
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.passes.merge_backward import merge_unneeded_splits
from hocket.planner.candidate import Candidate
from hocket.schedules import make_schedule

_FULL_STEPS: Final = 3  # and as many as there are devices: then a pipeline is full


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices, delays and versions of a schedule's stages.

    They do not depend on the number of microbatches.

    Args:
        devices: the device of each stage.
        splits: whether it splits any backward.
        num_versions: the versions of each stage's weights.
        delays: each stage's delay.
    """

    devices: tuple[int, ...]
    splits: bool
    num_versions: tuple[int, ...]
    delays: tuple[int, ...]

    @property
    def delay(self) -> int:
        """The largest delay of any stage."""
        return max(self.delays)

    @classmethod
    def of(cls, schedule: Schedule) -> Placement:
        """Return a schedule's placement, read from its ops."""
        kinds = {op.kind for lane in schedule.lanes for op in lane.ops}
        devices = tuple(stage.device for stage in schedule.program.stages)
        delays = tuple(stage.delay for stage in schedule.program.stages)
        splits = Kind.BACKWARD_INPUT in kinds
        if not any(delays):
            return cls(devices, splits, (1,) * len(devices), delays)
        return cls(devices, splits, check(schedule).num_versions, delays)


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


def prompt_placement_of(
    name: str, num_devices: int, stages_per_device: int
) -> Placement | None:
    """Return a schedule's placement, from as few microbatches as possible.

    Returns:
        None if it reads old weights: `delayed_placement_of` takes longer.

    Raises:
        ShapeError: the schedule does not take these numbers, or is no training of one
            model.
    """
    p = num_devices
    schedule = _first_of((1, p, 2 * p, 4 * p), name, p, stages_per_device, 1)
    program = schedule.program
    if not all(stage.trainable for stage in program.stages):
        raise ShapeError(f"{name} does not train all of its stages")
    if len(program.nets) > 1:
        raise ShapeError(f"{name} holds several nets: a plan is of one model")
    if any(stage.delay for stage in program.stages):
        return None
    return Placement.of(schedule)


def delayed_placement_of(
    name: str, num_devices: int, stages_per_device: int
) -> Placement:
    """Return the placement of a schedule that reads old weights.

    Its delays and versions are those of a pipeline that is full.
    """
    p = num_devices
    many = (p, 2 * p, 4 * p, 1)
    program = _first_of(many, name, p, stages_per_device, 1).program
    num_steps = _FULL_STEPS + -(-p // program.num_microbatches_of(0))
    return Placement.of(_first_of(many, name, p, stages_per_device, num_steps))


def _first_of(
    choices: Sequence[int],
    name: str,
    num_devices: int,
    stages_per_device: int,
    num_steps: int,
) -> Schedule:
    """Return a schedule with the first number of microbatches that it takes."""
    for num_microbatches in choices:
        try:
            return make_schedule(
                name,
                num_devices=num_devices,
                num_microbatches=num_microbatches,
                stages_per_device=stages_per_device,
                num_steps=num_steps,
            )
        except ShapeError as error:
            refused = error
    raise refused
