"""Play a schedule: lane by lane, or with a queue of events.

The fast clock needs no queue where the order on each lane decides all other orders: a
device has one lane, so no other lane slows it; a link carries messages of one device,
which enter it as that device's lane sends them (a collective sends when it has ended);
and no lane waits for another device's reduction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

import numpy as np

from hocket.core.costs import Costs
from hocket.core.op import MESSAGES, RECEIVES
from hocket.core.simulator.memory import Times
from hocket.core.simulator.needs import NO_OP, UNREAD, Messages
from hocket.core.simulator.work import Work, to_list
from hocket.core.walk import Walk
from hocket.errors import DeadlockError


def is_decided_by_lanes(work: Work) -> bool:
    """Return whether the order on each lane decides all other orders."""
    devices = [lane.device for lane in work.schedule.lanes]
    return (
        len(set(devices)) == len(devices)
        and not work.schedule.program.copies
        and not work.messages.is_explicit
        and not any(work.is_collective[row] for row in work.messages.maker.tolist())
        and _senders_are_alone(work.messages)
    )


def play_in_order(work: Work) -> Clock:
    """Return the clock when everything has happened, if `is_decided_by_lanes`.

    Raises:
        DeadlockError: no lane can move.
    """
    clock = Clock(work)
    item_s, seconds, num_ops = clock.item_s, work.seconds, work.columns.num_ops
    free_s = [0.0] * len(work.schedule.lanes)
    reduced_s = [0.0] * len(free_s)  # until when each lane's last reduction takes
    lanes = [range(*ends) for ends in pairwise(work.columns.first)]
    walk = Walk(lanes, _starts(clock, free_s))
    waiting = walk.waiting
    for lane, op in walk:
        time = clock.start_s[op]
        if work.is_collective[op]:
            clock.reduced_s[op] = begin_s = max(time, reduced_s[lane])
            item_s[op] = reduced_s[lane] = begin_s + seconds[op]
        else:
            item_s[op] = time = time + seconds[op]
        if op in waiting:
            walk.come(op)
        for message in range(work.post_from[op], work.post_from[op + 1]):
            time += clock.handling_s[message]
            item_s[num_ops + message] = clock.send(message, time)
            walk.come(num_ops + message)
        free_s[lane] = time
    refuse_stuck(work, walk.heads, item_s)
    return clock


def _starts(clock: Clock, free_s: list[float]) -> Callable[[int], int | None]:
    """Return what says when an op starts, or else the first item that it lacks.

    Args:
        clock: keeps the start.
        free_s: when each lane is free for its next op.
    """
    work, item_s, start_s = clock.work, clock.item_s, clock.start_s
    wait_from, wait_item = work.wait_from, work.wait_item
    handling_s, lane_of = work.wait_handling_s, work.columns.lane.tolist()

    def lacks(op: int) -> int | None:
        time = free_s[lane_of[op]]
        for wait in range(wait_from[op], wait_from[op + 1]):
            came_s = item_s[wait_item[wait]]
            if came_s == NOT_YET:
                return wait_item[wait]
            if came_s > time:
                time = came_s
            time += handling_s[wait]
        start_s[op] = time
        return None

    return lacks


def _senders_are_alone(messages: Messages) -> bool:
    sender_of: dict[int, int] = {}
    links, devices = messages.link.tolist(), messages.from_device.tolist()
    return all(
        sender_of.setdefault(link, device) == device
        for link, device in set(zip(links, devices, strict=True))
    )


# Keep what a clock finds out, and report lanes that cannot move.

NOT_YET: Final = -1.0  # no time is negative


class Clock:
    """What both clocks keep: when ops start, items come and links are free."""

    def __init__(self, work: Work) -> None:
        messages = work.messages
        self.work = work
        self.start_s = [0.0] * work.columns.num_ops
        self.item_s = [NOT_YET] * work.num_items
        self.sent_s = [0.0] * messages.num_messages  # begins to occupy its link
        self.arrived_s = [0.0] * messages.num_messages
        # when each reduction began, by row: it may have waited for another
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
        link: int = self.link[message]
        self.sent_s[message] = sent_s = max(time, self.link_free_s[link])
        self.link_free_s[link] = free_s = sent_s + self.occupied_s[message]
        self.arrived_s[message] = arrived_s = free_s + self.latency_s[message]
        return arrived_s

    @property
    def times(self) -> Times:
        """When ops started and ended, messages were sent and had arrived."""
        end_s = self.item_s[: self.work.columns.num_ops]
        return Times(*map(np.array, (self.start_s, end_s, self.sent_s, self.arrived_s)))


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


# Play a schedule with a queue of events, in order of time.
#
# It knows what the fast clock cannot: lanes of one device that slow each other, links
# that several devices share, and messages that are ops of the schedule.
#
# At one instant, ops that end go first, then ops that begin, then messages; among
# equals the lower lane, or the message of the op that is listed first.

_ENDS: Final = 0
_BEGINS: Final = 1
_IS_SENT: Final = 2


def play_events(work: Work, costs: Costs) -> Clock:
    """Return when everything happens, in any schedule.

    Raises:
        DeadlockError: no lane can move.
    """
    clock = _Clock(work, costs.lane_capacity)
    clock.run()
    rows = {lane.number: lane.op for lane in clock.lanes if lane.op < lane.stop}
    refuse_stuck(work, rows, clock.item_s)
    return clock


@dataclass(slots=True, eq=False)
class _Lane:
    """Where a lane stands, and the op that it works on.

    Args:
        number: its index in the schedule.
        op: the row of the op that it works on, or else of the next one.
        stop: the row after its last op.
        free_s: when it is free for the next op.
        left_s: work left at `since_s`, in seconds of an undisturbed lane.
        pace: seconds of work per second since then; 0 before the op has begun.
        end_s: when the op will have ended at this pace.
    """

    number: int
    op: int
    stop: int
    free_s: float = 0.0
    left_s: float = 0.0
    since_s: float = 0.0
    pace: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Device:
    """What the lanes of a device have in common."""

    busy: list[_Lane] = field(default_factory=list)
    reduced_s: float = 0.0  # when its last reduction has ended


class _Clock(Clock):
    def __init__(self, work: Work, lane_capacity: float) -> None:
        super().__init__(work)
        columns, messages = work.columns, work.messages
        self.lane_capacity = lane_capacity
        self.queue: list[tuple[float, int, int]] = []  # time, event, lane or message
        self.lanes = [
            _Lane(i, columns.first[i], columns.first[i + 1])
            for i in range(len(work.schedule.lanes))
        ]
        devices: defaultdict[int, _Device] = defaultdict(_Device)
        self.device = [devices[lane.device] for lane in work.schedule.lanes]
        self.waiting: dict[int, list[_Lane]] = {}  # item -> lanes that wait for it

        self.is_message = columns.is_any(MESSAGES).tolist()
        self.is_receive = columns.is_any(RECEIVES).tolist()
        num_posts = 2 if messages.is_explicit else 1
        self.posts_missing = [num_posts] * messages.num_messages
        self.ready_s = [0.0] * messages.num_messages
        self.sender = messages.sender.tolist()
        self.receiver = messages.receiver.tolist()
        self.arrival = messages.arrival.tolist()

    def run(self) -> None:
        """Handle events until there are none."""
        for lane in self.lanes:
            self._look(lane)
        while self.queue:
            time, event, number = heappop(self.queue)
            if event == _IS_SENT:
                self._send(number, time)
            elif event == _BEGINS:
                self._begin(self.lanes[number], time)
            elif self.lanes[number].end_s == time and self.lanes[number].pace:
                self._end(self.lanes[number], time)  # else its pace has changed since

    def _look(self, lane: _Lane) -> None:
        """See when a free lane can begin its next op, or what it must wait for."""
        if lane.op == lane.stop:
            return
        work, time = self.work, lane.free_s
        for wait in range(work.wait_from[lane.op], work.wait_from[lane.op + 1]):
            item = work.wait_item[wait]
            if self.item_s[item] == NOT_YET:
                self.waiting.setdefault(item, []).append(lane)
                return
            time = max(time, self.item_s[item]) + work.wait_handling_s[wait]
        heappush(self.queue, (time, _BEGINS, lane.number))

    def _begin(self, lane: _Lane, time: float) -> None:
        """Begin a lane's next op; the lane goes on at once if it is asynchronous."""
        op = lane.op
        self.start_s[op] = time
        if self.work.is_collective[op]:
            device = self.device[lane.number]
            self.reduced_s[op] = begin_s = max(time, device.reduced_s)
            device.reduced_s = begin_s + self.work.seconds[op]
            self._go_on(lane, time)
            self._come(op, device.reduced_s)
            self._post(op, device.reduced_s)  # not by the lane, which has gone on
        elif self.is_message[op]:
            self._go_on(lane, self._post(op, time))
        else:
            lane.left_s, lane.since_s, lane.pace = self.work.seconds[op], time, 0.0
            self.device[lane.number].busy.append(lane)
            self._set_pace(self.device[lane.number], time)

    def _end(self, lane: _Lane, time: float) -> None:
        """End the op that a lane works on."""
        lane.pace = 0.0
        device = self.device[lane.number]
        device.busy.remove(lane)
        self._set_pace(device, time)
        op = lane.op
        self._go_on(lane, self._post(op, time))
        self._come(op, time)

    def _go_on(self, lane: _Lane, time: float) -> None:
        lane.op += 1
        lane.free_s = time
        self._look(lane)

    def _set_pace(self, device: _Device, time: float) -> None:
        """Share a device among its busy lanes."""
        if not device.busy:
            return
        pace = min(1.0, self.lane_capacity / len(device.busy))
        for lane in device.busy:
            if lane.pace == pace:
                continue
            lane.left_s -= (time - lane.since_s) * lane.pace
            lane.since_s, lane.pace = time, pace
            lane.end_s = time + max(0.0, lane.left_s) / pace
            heappush(self.queue, (lane.end_s, _ENDS, lane.number))

    def _post(self, op: int, time: float) -> float:
        """Hand over what an op sends or receives; return when the lane is free."""
        work = self.work
        for message in work.post_message[work.post_from[op] : work.post_from[op + 1]]:
            if not self.is_receive[op]:
                time += self.handling_s[message]
            self.ready_s[message] = max(self.ready_s[message], time)
            self.posts_missing[message] -= 1
            if not self.posts_missing[message]:
                heappush(self.queue, (self.ready_s[message], _IS_SENT, message))
        return time

    def _send(self, message: int, time: float) -> None:
        """Send a message as soon as those before it have left the link."""
        arrived_s = self.send(message, time)
        if self.receiver[message] != NO_OP:
            self.item_s[self.sender[message]] = arrived_s
            self.item_s[self.receiver[message]] = arrived_s
        if self.arrival[message] != UNREAD:
            self._come(self.work.columns.num_ops + self.arrival[message], arrived_s)

    def _come(self, item: int, time: float) -> None:
        """Note that an item arrives at `time`, which may be later than now."""
        if self.item_s[item] == NOT_YET:
            self.item_s[item] = time
            for lane in self.waiting.pop(item, ()):
                self._look(lane)
