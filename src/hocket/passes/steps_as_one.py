"""Turn an order of several steps into one of a single, larger step."""

from __future__ import annotations

from dataclasses import replace

from hocket.core.op import Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule


def steps_as_one(schedule: Schedule) -> Schedule:
    r"""Return the same ops in the same order, as microbatches of one step.

    An order of one step stays as it is.

    >>> two = Schedule.parse("d0  0F0 0F1 0F0@1 0B0 0B1 0F1@1 0B0@1 0B1@1")
    >>> print(steps_as_one(two))
    d0  0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3

    Args:
        schedule: a schedule without R and U, which end a step.
    """
    program = schedule.program
    num_steps = program.num_steps
    if num_steps == 1:
        return schedule
    nets = tuple(
        replace(net, num_microbatches=net.num_microbatches * num_steps)
        for net in program.nets
    )
    stages = tuple(replace(stage, delay=0) for stage in program.stages)
    lanes = tuple(
        replace(lane, ops=tuple(_moved(op, program) for op in lane.ops))
        for lane in schedule.lanes
    )
    return Schedule(replace(program, nets=nets, stages=stages, num_steps=1), lanes)


def _moved(op: Op, program: Program) -> Op:
    assert op.microbatch is not None, f"{op} ends a step"
    before = op.step * program.num_microbatches_of(op.stage)
    return replace(op, microbatch=before + op.microbatch, step=0)
