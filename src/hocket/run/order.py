"""The order that a pipeline plays: made by name, or given and then looked at."""

from __future__ import annotations

from hocket.errors import RunError, ShapeError
from hocket.plan.op import Kind
from hocket.plan.schedule import Schedule
from hocket.run.layout import Layout
from hocket.schedules import make_schedule

RUNS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE, Kind.UPDATE})


def make_order(
    schedule: str | Schedule,
    layout: Layout,
    num_microbatches: int,
    stages_per_device: int | None,
) -> Schedule:
    """One step's order of this pipeline's work.

    Args:
        schedule: a name, or an order of one step.
        layout: how many devices and replicas there are.
        num_microbatches: in each replica.
        stages_per_device: where the schedule lets one choose.

    Raises:
        ShapeError: the schedule's constraints refuse the numbers, or the order given
            is for other ones.
        RunError: the order holds ops that the pipeline cannot run.
    """
    if isinstance(schedule, str):
        return make_schedule(
            schedule,
            num_devices=layout.num_devices,
            num_microbatches=num_microbatches,
            num_replicas=layout.num_replicas,
            stages_per_device=stages_per_device,
        )
    program = schedule.program
    wanted = (layout.num_devices, num_microbatches, 1, layout.num_replicas)
    given = (
        program.num_devices,
        program.nets[0].num_microbatches,
        program.num_steps,
        program.num_replicas,
    )
    if given != wanted or len(program.nets) != 1:
        words = "{} devices, {} microbatches, {} steps, {} replicas"
        raise ShapeError(
            f"the schedule given is for {words.format(*given)} and {len(program.nets)} "
            f"nets; this pipeline needs {words.format(*wanted)} and 1 net"
        )
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.kind not in RUNS:
                raise RunError(
                    f"{op}: the pipeline runs F, B, R and U; I and W need a split "
                    "backward, L a loss over the whole batch, and messages are sent "
                    "without being told"
                )
    return schedule
