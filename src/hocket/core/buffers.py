"""Count the receive buffers with which no sender waits for a busy reader.

`check` proves how few buffers avoid a deadlock. With so few a sender may still wait for
a reader that is busy with other work, which costs time that no formula counts:

    d1 sends        1F0 1F1 1F2 1F3         d0 holds four messages before it reads
    d0 is busy      0F2 0F3 0F4 0F5 2F0     the first: with three buffers d1 would stop
"""

from __future__ import annotations

from collections import defaultdict

from hocket.core.costs import Costs
from hocket.core.dataflow import Value, is_sent, makes, needs
from hocket.core.op import MESSAGES
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate


def buffers_without_waiting(schedule: Schedule) -> int:
    """Return the most messages of one flow that are sent and not yet read.

    The times are those of equal stages.

    Args:
        schedule: one that `check` accepts, without explicit messages.
    """
    program = schedule.program
    made_s: dict[Value, float] = {}
    read_s: dict[tuple[Value, int], float] = {}
    for span in simulate(schedule, Costs.uniform()).spans:
        device = schedule.lanes[span.lane].device
        if span.op.kind in MESSAGES:
            continue
        for value in makes(span.op, program):
            made_s[value] = span.end_s
        for value in needs(span.op, program):
            if is_sent(value, device, program):
                last = read_s.get((value, device), 0.0)
                read_s[value, device] = max(last, span.start_s)
    changes: dict[object, list[tuple[float, int]]] = defaultdict(list)
    for (value, device), end_s in read_s.items():
        flow = (value.fact, value.stage, device)
        changes[flow] += [(made_s[value], 1), (end_s, -1)]
    return max((_most_at_once(flow) for flow in changes.values()), default=1)


def _most_at_once(changes: list[tuple[float, int]]) -> int:
    """Return the highest sum; at one instant, sends count before reads."""
    most = count = 0
    for _, change in sorted(changes, key=lambda pair: (pair[0], -pair[1])):
        count += change
        most = max(most, count)
    return most
