"""Play a schedule lane by lane, each as far as it comes, without a queue of events.

It needs no queue because here the order on each lane decides all other orders: a
device has one lane, so no other lane slows it; a link carries messages of one device,
which enter it as that device's lane sends them (a collective sends when it has ended);
and no lane waits for another device's reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hocket.core.simulator.messages import Messages
from hocket.core.simulator.played import NOT_YET, Clock, Played, refuse_stuck
from hocket.core.simulator.work import Work
from hocket.core.walk import Walk


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
    return Played(
        clock.start_s,
        item_s[:num_ops],
        clock.sent_s,
        item_s[num_ops:-1],
        clock.reduced_s,
    )


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
