"""Keep what a clock finds out, and report lanes that cannot move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hocket.core.simulator.work import Work
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
