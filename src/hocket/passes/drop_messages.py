"""Remove the messages from a schedule."""

from __future__ import annotations

from hocket.core.op import MESSAGES
from hocket.core.schedule import Schedule
from hocket.passes.segments import filtered


def drop_messages(schedule: Schedule) -> Schedule:
    r"""Return the order of work alone, as it was before `add_messages`.

    Of a repeating body, those repetitions stay that were alike with their messages.

    >>> lines = "d0  0F0 0SEND_F0>1", "d1  1RECV_F0<0 1F0"
    >>> print(drop_messages(Schedule.parse("\n".join(lines))))
    d0  0F0
    d1  1F0
    """
    return filtered(schedule, lambda op: op.kind not in MESSAGES)
