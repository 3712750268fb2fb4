"""Remove the messages from a schedule."""

from __future__ import annotations

from dataclasses import replace

from hocket.core.op import MESSAGES
from hocket.core.schedule import Schedule


def drop_messages(schedule: Schedule) -> Schedule:
    r"""Return the order of work alone, as it was before `add_messages`.

    Of a repeating body, those repetitions stay that were alike with their messages.

    >>> lines = "d0  0F0 0SEND_F0>1", "d1  1RECV_F0<0 1F0"
    >>> print(drop_messages(Schedule.parse("\n".join(lines))))
    d0  0F0
    d1  1F0
    """
    lanes, body = [], []
    for i, lane in enumerate(schedule.lanes):
        stays = [op.kind not in MESSAGES for op in lane.ops]
        ops = tuple(op for op, stay in zip(lane.ops, stays, strict=True) if stay)
        lanes.append(replace(lane, ops=ops))
        if schedule.body:
            begin, end = schedule.body[i]
            body.append((sum(stays[:begin]), sum(stays[:end])))
    return replace(schedule, lanes=tuple(lanes), body=tuple(body))
