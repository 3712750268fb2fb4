"""Extract one step from an order in which several are in flight."""

from __future__ import annotations

from dataclasses import replace

from hocket.core.schedule import Lane, Schedule


def one_step(schedule: Schedule) -> Schedule:
    r"""Return the work of step 0 alone, in the same order, with the newest weights.

    All delays become 0, because the weights that a single step reads are there before
    it begins. An order of one step stays as it is.

    >>> from hocket.schedules import make_schedule
    >>> two_bw = make_schedule(
    ...     "pipedream-2bw", num_devices=2, num_microbatches=2, num_steps=4
    ... )
    >>> print(one_step(two_bw))
    d0  0F0 0F1 0B0 0B1 0U
    d1  1F0 1B0 1F1 1B1 1U

    Args:
        schedule: a schedule without messages.
    """
    program = schedule.program
    if program.num_steps == 1 and not any(stage.delay for stage in program.stages):
        return schedule
    stages = tuple(replace(stage, delay=0) for stage in program.stages)
    lanes = tuple(
        Lane(lane.device, lane.stream, tuple(op for op in lane.ops if not op.step))
        for lane in schedule.lanes
    )
    return Schedule(replace(program, stages=stages, num_steps=1), lanes)
