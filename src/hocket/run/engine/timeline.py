"""Bring together when the workers did what: the measured timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import observed
from hocket.core.timelines.timeline import DataWait, Origin, Timeline
from hocket.run.diagnostics.job_folder import Json
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.worker_context import WorkerContext


def gather_timeline(
    schedule: Schedule,
    costs: Costs,
    record: OpTimes,
    context: WorkerContext,
    data_waits_s: Sequence[tuple[float, float]] = (),
) -> Timeline:
    """The first replica's step as one timeline, on one clock, from second 0.

    Every worker must call this, and gets the timeline.

    Args:
        schedule: what was done.
        costs: say how many bytes everything has.
        record: this worker's times.
        context: this worker's.
        data_waits_s: begin and end of this worker's waits for batches.
    """
    world, layout = context.world, context.layout
    offset = world.clock_offset_s
    own: Json = {
        "device": layout.device,
        "replica": layout.pipeline + layout.tp_rank,
        "start_s": [(times + offset).tolist() for times in record.start_s],
        "end_s": [(times + offset).tolist() for times in record.end_s],
        "data_waits_s": [(a + offset, b + offset) for a, b in data_waits_s],
    }
    parts = [part for part in world.gather_json(own) if part["replica"] == 0]
    waits = [(part["device"], *both) for part in parts for both in part["data_waits_s"]]
    firsts = [min(times) for part in parts for times in part["start_s"] if times]
    begin = min((*firsts, *(start_s for _, start_s, _ in waits)))
    lanes = {
        number: (part["start_s"][i], part["end_s"][i])
        for part in parts
        for i, number in enumerate(schedule.lanes_of(int(part["device"])))
    }
    starts = tuple(np.array(lanes[n][0]) - begin for n in range(len(schedule.lanes)))
    ends = tuple(np.array(lanes[n][1]) - begin for n in range(len(schedule.lanes)))
    return replace(
        observed(schedule, costs, starts, ends, Origin.MEASURED),
        data_waits=tuple(DataWait(i, a - begin, b - begin) for i, a, b in waits),
    )
