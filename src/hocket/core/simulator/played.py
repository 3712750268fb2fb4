"""Keep what a clock finds out, and report lanes that cannot move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hocket.core.simulator.work import Work, to_list
from hocket.errors import DeadlockError

NOT_YET: Final = -1.0  # no time is negative


@dataclass(frozen=True, slots=True)
class Played:
    """When everything happened.

    Args:
        start_s: when its lane started each op.
        end_s: when each op had ended.
        sent_s: when each message began to occupy its link.
        arrived_s: when each message was usable.
        reduced_s: when each reduction began, by row (it may have waited for another).
    """

    start_s: list[float]
    end_s: list[float]
    sent_s: list[float]
    arrived_s: list[float]
    reduced_s: dict[int, float]


class Clock:
    """What both clocks keep: when ops start, items come and links are free."""

    def __init__(self, work: Work) -> None:
        messages = work.messages
        self.work = work
        self.start_s = [0.0] * work.columns.num_ops
        self.item_s = [NOT_YET] * work.num_items
        self.sent_s = [0.0] * messages.num_messages
        self.reduced_s: dict[int, float] = {}
        self.link = messages.link.tolist()
        self.occupied_s = to_list(messages.occupied_s)
        self.latency_s = to_list(messages.latency_s)
        self.handling_s = to_list(messages.handling_s)
        self.link_free_s = [0.0] * (1 + max(self.link, default=0))


def refuse_stuck(work: Work, position: list[int], item_s: list[float]) -> None:
    """Raise unless every lane came to its end.

    Args:
        work: what was played.
        position: the row of the op at which each lane stands.
        item_s: when each item came, or NOT_YET.

    Raises:
        DeadlockError: it names where each lane stands, and what it waits for.
    """
    faults = []
    for i, lane in enumerate(work.schedule.lanes):
        row = position[i]
        if row == work.columns.first[i + 1]:
            continue
        reason = work.describe_wait(row, lambda item: item_s[item] != NOT_YET)
        op = work.columns.op(row, work.schedule)
        faults.append(f"  {lane.label} stands at {op} and {reason}")
    if faults:
        raise DeadlockError(("no lane can move, each waits for another:", *faults))
