"""Keep what a clock finds out, and report lanes that cannot move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    def send(self, message: int, time: float) -> float:
        """Send a message once those before it have left the link; return its arrival.

        Args:
            message: the message's number.
            time: when it is ready to go.
        """
        link = self.link[message]
        self.sent_s[message] = sent_s = max(time, self.link_free_s[link])
        self.link_free_s[link] = free_s = sent_s + self.occupied_s[message]
        return free_s + self.latency_s[message]


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a lane stands that cannot move, and why."""

    lane: int
    position: int  # of the op in the lane that cannot start, or cannot end
    text: str

    def __str__(self) -> str:
        """One line of an error."""
        return f"  {self.text}"


def stands(
    work: Work, rows: Mapping[int, int], reason: Callable[[int], str]
) -> Iterator[Stand]:
    """Yield where lanes stand.

    Args:
        work: what was played.
        rows: the row of the op at which each lane stands that has not come to its end.
        reason: says what a lane waits for, by its number.
    """
    for number, row in rows.items():
        lane, position = work.schedule.lanes[number], row - work.columns.first[number]
        text = f"{lane.label} stands at {lane.ops[position]} and {reason(number)}"
        yield Stand(number, position, text)


def refuse_stuck(work: Work, rows: Mapping[int, int], item_s: list[float]) -> None:
    """Raise unless every lane came to its end.

    Args:
        work: what was played.
        rows: the row of the op at which each lane stands that has not come to its end.
        item_s: when each item came, or NOT_YET.

    Raises:
        DeadlockError: it names where each lane stands, and what it waits for.
    """

    def reason(lane: int) -> str:
        return work.describe_wait(rows[lane], lambda item: item_s[item] != NOT_YET)

    if rows:
        lines = map(str, stands(work, rows, reason))
        raise DeadlockError(("no lane can move, each waits for another:", *lines))
