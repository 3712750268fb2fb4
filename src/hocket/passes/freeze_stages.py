"""Remove the backwards of frozen stages from a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hocket.core.op import BACKWARDS, Kind
from hocket.core.schedule import Schedule
from hocket.passes.segments import filtered

_TRAINING: Final = BACKWARDS | {Kind.BACKWARD_WEIGHT, Kind.REDUCE, Kind.UPDATE}


def freeze_stages(schedule: Schedule, num_frozen: int) -> Schedule:
    r"""Return the same order, with the first stages run forward only.

    If no stage before a frozen one is trained, it needs no gradient: it has no
    backward, no update, and no stage sends it a gradient. All other work keeps its
    order.

    Args:
        schedule: a schedule without messages.
        num_frozen: the number of frozen stages, from stage 0 on.

    >>> lines = "d0  0F0 0F1 0B0 0B1 0U", "d1  1F0 1B0 1F1 1B1 1U"
    >>> print(freeze_stages(Schedule.parse("\n".join(lines)), 1))
    steps 1
    replicas 1
    net model microbatches=2
    stage 0 net=model device=0 trainable=no
    stage 1 net=model device=1
    flow 0>1
    d0  0F0 0F1
    d1  1F0 1B0 1F1 1B1 1U
    """
    if not num_frozen:
        return schedule
    stages = tuple(
        replace(stage, trainable=False, delay=0) if number < num_frozen else stage
        for number, stage in enumerate(schedule.program.stages)
    )
    less = filtered(
        schedule, lambda op: op.stage >= num_frozen or op.kind not in _TRAINING
    )
    return replace(less, program=replace(schedule.program, stages=stages))
