"""Bring together when the workers did what: the measured timeline of a step."""

from __future__ import annotations

import numpy as np

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import observed
from hocket.core.timeline import Origin, Timeline
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.engine.worker import Record


def gather_timeline(
    schedule: Schedule, costs: Costs, record: Record, world: World, layout: Layout
) -> Timeline:
    """The first replica's step as one timeline, on one clock, from second 0.

    Every worker must call this, and gets the timeline.

    Args:
        schedule: what was done.
        costs: say how many bytes everything has.
        record: of this worker.
        world: the job.
        layout: of the ranks.
    """
    offset = world.clock_offset_s
    own = {
        "device": layout.device,
        "replica": layout.replica,
        "start_s": (record.start_s + offset).tolist(),
        "end_s": (record.end_s + offset).tolist(),
    }
    parts = [part for part in world.gather_json(own) if part["replica"] == 0]
    parts.sort(key=lambda part: int(part["device"]))
    begin = min(min(part["start_s"]) for part in parts if part["start_s"])
    starts = tuple(np.array(part["start_s"]) - begin for part in parts)
    ends = tuple(np.array(part["end_s"]) - begin for part in parts)
    return observed(schedule, costs, starts, ends, Origin.MEASURED)
