"""Find where each step lies on each lane, so that pictures can shade steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.core.timelines.timeline import Timeline


def step_ends(timeline: Timeline) -> tuple[NDArray[np.float64], ...]:
    """Return when each lane ends each step: after its last op of that step.

    Steps that overlap on a lane, as in flush-free orders, are cut where the earlier
    one ends. Step `t` lies between end `t - 1` and end `t`; times are as in the
    timeline's spans.

    Returns:
        One array per lane, one ascending entry per step.
    """
    num_steps = timeline.schedule.program.num_steps
    ends = []
    for lane, end_s in zip(timeline.schedule.lanes, timeline.end_s, strict=True):
        last = np.full(num_steps, timeline.begin_s)
        steps = np.fromiter((op.step for op in lane.ops), dtype=np.intp)
        np.maximum.at(last, steps, end_s)
        ends.append(np.maximum.accumulate(last))
    return tuple(ends)
