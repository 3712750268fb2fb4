"""Play a schedule lane by lane, each as far as it comes, without a queue of events.

It needs no queue because here the order on each lane decides all other orders: a
device has one lane, so no other lane slows it; a link carries messages of one device,
which enter it as that device's lane sends them (a collective sends when it has ended);
and no lane waits for another device's reduction.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.core.simulator.messages import Messages
from hocket.core.simulator.played import NOT_YET, Clock, Played, refuse_stuck
from hocket.core.simulator.work import Work


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


def play_in_order(work: Work) -> Played:
    """Return when everything happens, if `is_decided_by_lanes`.

    Raises:
        DeadlockError: no lane can move.
    """
    clock = _Clock(work)
    lanes = [clock.lane(i) for i in range(len(work.schedule.lanes))]
    runnable = list(range(len(lanes)))
    while runnable:
        lane = runnable.pop()
        item = next(lanes[lane], None)
        if item is not None:
            clock.waiting.setdefault(item, []).append(lane)
        runnable += clock.woken
        clock.woken.clear()
    refuse_stuck(work, clock.position, clock.item_s)
    num_ops = work.columns.num_ops
    return Played(
        clock.start_s,
        clock.item_s[:num_ops],
        clock.sent_s,
        clock.item_s[num_ops:-1],
        clock.reduced_s,
    )


def _senders_are_alone(messages: Messages) -> bool:
    sender_of: dict[int, int] = {}
    links, devices = messages.link.tolist(), messages.from_device.tolist()
    return all(
        sender_of.setdefault(link, device) == device
        for link, device in set(zip(links, devices, strict=True))
    )


class _Clock(Clock):
    """Lanes as generators: each runs until it must wait, and yields for what."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.position = list(work.columns.first[:-1])
        self.waiting: dict[int, list[int]] = {}  # item -> lanes that wait for it
        self.woken: list[int] = []

    def lane(self, lane: int) -> Iterator[int]:
        """Run a lane, and yield each item that it waits for."""
        work, item_s, start_s = self.work, self.item_s, self.start_s
        waiting = self.waiting
        wait_from, wait_item = work.wait_from, work.wait_item
        handling_s, post_from = work.wait_handling_s, work.post_from
        begin, end = work.columns.first[lane : lane + 2]
        time = reduced = 0.0
        for op in range(begin, end):
            for wait in range(wait_from[op], wait_from[op + 1]):
                item = wait_item[wait]
                if item_s[item] == NOT_YET:
                    self.position[lane] = op
                    yield item
                if item_s[item] > time:
                    time = item_s[item]
                time += handling_s[wait]
            start_s[op] = time
            if work.is_collective[op]:
                self.reduced_s[op] = begin_s = max(time, reduced)
                item_s[op] = reduced = begin_s + work.seconds[op]
                self.wake(op)
                continue
            item_s[op] = time = time + work.seconds[op]
            if op in waiting:
                self.wake(op)
            if post_from[op] < post_from[op + 1]:
                time = self._send(range(post_from[op], post_from[op + 1]), time)
        self.position[lane] = end

    def _send(self, messages: range, time: float) -> float:
        """Send what an op made; return when the lane has handled it all."""
        for message in messages:
            time += self.handling_s[message]
            link = self.link[message]
            sent_s = max(time, self.link_free_s[link])
            self.sent_s[message] = sent_s
            self.link_free_s[link] = free_s = sent_s + self.occupied_s[message]
            item = self.work.columns.num_ops + message
            self.item_s[item] = free_s + self.latency_s[message]
            self.wake(item)
        return time

    def wake(self, item: int) -> None:
        """Let the lanes go on that wait for an item."""
        if item in self.waiting:
            self.woken += self.waiting.pop(item)
