"""Idle seconds before each op, without what the host needs to send and read messages.

op ├─ sends ─┼─ waits ─┼─ reads ─┤ op
"""

from __future__ import annotations

import numpy as np

from hocket.core.costs import Costs
from hocket.core.simulator.work import prepare
from hocket.core.timelines.arrays import Floats
from hocket.core.timelines.timeline import Timeline


def waits_s(timeline: Timeline, costs: Costs) -> list[Floats]:
    """Return the seconds that each lane waits before each of its ops.

    Args:
        timeline: a simulated one.
        costs: those that it was simulated with.
    """
    work = prepare(timeline.schedule, costs)
    sent_s = work.messages.handling_s.tolist()
    found = []
    for number, first in enumerate(work.columns.first[:-1]):
        start_s, end_s = timeline.start_s[number], timeline.end_s[number]
        goes_on = work.is_collective[first : first + start_s.size]  # the lane, at once
        free_s = np.where(goes_on, start_s, end_s)
        gaps_s = start_s - np.append(0.0, free_s[:-1])
        for i in range(gaps_s.size):
            row = first + i
            reads = slice(work.wait_from[row], work.wait_from[row + 1])
            gaps_s[i] -= sum(work.wait_handling_s[reads])
            if i and not goes_on[i - 1]:
                sends = slice(work.post_from[row - 1], work.post_from[row])
                gaps_s[i] -= sum(sent_s[x] for x in work.post_message[sends])
        found.append(np.maximum(gaps_s, 0.0))
    return found
