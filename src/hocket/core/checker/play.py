"""Play a schedule without a clock, under the strictest rule for messages.

A send is a rendezvous: the lane that made a value goes on only when the receiver has a
buffer for it. A buffer is taken when its message is sent and released when the op that
needs the value starts. An order that ends under this rule ends under every weaker one
(sends that do not wait, messages that are buffered on the way).

Messages share buffers if one lane sends them, and they bring values of one kind and
stage to one device. So no two lanes compete for a buffer, and whether all lanes end
does not depend on which of them is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from hocket.core.simulator.messages import UNREAD
from hocket.core.simulator.values import ValueNumbers
from hocket.core.simulator.work import Work
from hocket.core.timelines.arrays import Ints


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a deadlocked lane stands, and why."""

    lane: int
    label: str
    position: int  # of the op in the lane that cannot start, or cannot end
    reason: str

    def __str__(self) -> str:
        """One line of an error."""
        return f"  {self.label} stands at {self.reason}"


@dataclass(frozen=True, slots=True)
class CheckedOrder:
    """How far the lanes came.

    Args:
        num_buffers: receive buffers per flow.
        order: the rows of all ops that started, in the order in which they did.
        stuck: where deadlocked lanes stand; empty if all lanes ended.
    """

    num_buffers: int
    order: list[int]
    stuck: list[Stand]


def play(work: Work, num_buffers: int | None = None) -> CheckedOrder:
    """Run every lane as far as it goes.

    Where lanes can only wait for buffers, each flow gets one more, and they go on: with
    more buffers they would have come to the same ops by another way. So one run finds
    the fewest buffers that suffice.

    Args:
        work: a complete schedule (see `op_faults`), with any costs.
        num_buffers: receive buffers per flow: messages that may wait at the receiver;
            the fewest with which no lane waits for one for ever when not given.
    """
    state = _State(work, num_buffers or 1)
    state.run()
    while num_buffers is None and state.add_buffer():
        state.run()
    return CheckedOrder(state.num_buffers, state.order, list(state.stuck()))


_ENDED: Final = -1
_NEEDS: Final = -2  # where a lane stands that does not wait for a buffer


class _State:
    """Lanes as generators: each runs until it must wait, and yields for what."""

    def __init__(self, work: Work, num_buffers: int) -> None:
        self.work = work
        self.num_buffers = num_buffers
        self.num_ops = work.columns.num_ops
        num_lanes = len(work.schedule.lanes)
        self.row = [0] * num_lanes  # at which each lane stands
        self.unsent = [_NEEDS] * num_lanes  # the arrival that has no buffer
        self.runnable = list(range(num_lanes))[::-1]
        self.lanes = [self._lane(lane) for lane in range(num_lanes)]
        self.has = bytearray(work.num_items)
        self.order: list[int] = []
        self.waiting: dict[int, list[int]] = {}  # item -> lanes

        # Messages that are ops of the schedule; both ends post one.
        self.is_explicit = work.messages.is_explicit
        self.arrival = work.messages.arrival.tolist()
        self.posts_left = [2] * work.messages.num_messages

        # Receive buffers; one lane sends all messages of a flow.
        self.flow = _flows(work).tolist()
        self.in_buffers = [0] * (1 + max(self.flow, default=0))  # by flow
        self.full: dict[int, int] = {}  # flow -> the lane that wants to send
        self.reads_left = _reads(work)  # by item

    def run(self) -> None:
        """Run all lanes that can, until none can."""
        runnable = self.runnable
        while runnable:
            lane = runnable.pop()
            self.unsent[lane] = next(self.lanes[lane], _ENDED)

    def add_buffer(self) -> bool:
        """Add one to the buffers of each flow; return whether a lane waits for it."""
        self.runnable += self.full.values()
        self.full.clear()
        self.num_buffers += bool(self.runnable)
        return bool(self.runnable)

    def stuck(self) -> Iterator[Stand]:
        """Yield the lanes that did not end, each with its reason."""
        for number, lane in enumerate(self.work.schedule.lanes):
            row, unsent = self.row[number], self.unsent[number]
            if unsent == _ENDED:
                continue
            if unsent == _NEEDS:
                reason = self.work.describe_wait(row, self.has.__getitem__)
            else:
                reason = self._cannot_send(unsent)
            position = row - self.work.columns.first[number]
            text = f"{lane.ops[position]} and {reason}"
            yield Stand(number, lane.label, position, text)

    def _cannot_send(self, arrival: int) -> str:
        arrivals = self.work.needs.arrivals
        value = ValueNumbers.of(self.work.schedule.program).value(
            int(arrivals.value[arrival])
        )
        return (
            f"cannot send {value} to device {arrivals.device[arrival]}: all "
            f"{self.num_buffers} receive buffers there hold unread messages"
        )

    def _lane(self, lane: int) -> Iterator[int]:
        """Run a lane; yield where it waits: the arrival that has no buffer, or _NEEDS.

        A send follows its op: the lane goes on when the receiver has a buffer for it.
        """
        work, has, num_ops = self.work, self.has, self.num_ops
        wait_from, wait_item = work.wait_from, work.wait_item
        send_from = [0] * (num_ops + 1) if self.is_explicit else work.post_from
        sends = work.post_message  # arrival `i` is brought by message `i`
        flows, in_buffers, reads_left = self.flow, self.in_buffers, self.reads_left
        end, come = self._post if self.is_explicit else self._come, self._come
        for row in range(*work.columns.first[lane : lane + 2]):
            items = wait_item[wait_from[row] : wait_from[row + 1]]
            for item in items:
                while not has[item]:
                    self.waiting.setdefault(item, []).append(lane)
                    self.row[lane] = row
                    yield _NEEDS
            self.order.append(row)
            for item in items:
                reads_left[item] -= 1
                if not reads_left[item]:
                    self._free(item)
            end(row)
            for arrival in sends[send_from[row] : send_from[row + 1]]:
                flow = flows[arrival]
                while in_buffers[flow] >= self.num_buffers:
                    self.full[flow] = lane
                    self.row[lane] = row
                    yield arrival
                in_buffers[flow] += 1
                come(num_ops + arrival)

    def _come(self, item: int) -> None:
        self.has[item] = 1
        if item in self.waiting:
            self.runnable += self.waiting.pop(item)

    def _free(self, item: int) -> None:
        """Free the buffer of a message that no later op reads."""
        flow = self.flow[item - self.num_ops]
        self.in_buffers[flow] -= 1
        if flow in self.full:
            self.runnable.append(self.full.pop(flow))

    def _post(self, row: int) -> None:
        """Post what an op sends or receives; it arrives once both ends posted it."""
        self._come(row)
        begin, end = self.work.post_from[row : row + 2]
        for message in self.work.post_message[begin:end]:
            self.posts_left[message] -= 1
            arrival = self.arrival[message]
            if not self.posts_left[message] and arrival != UNREAD:
                self._come(self.num_ops + arrival)


def _reads(work: Work) -> list[int]:
    """Return how often each arrival in a buffer is read; 0 for all other items."""
    reads = np.bincount(np.array(work.wait_item, np.int64), minlength=work.num_items)
    reads[: work.columns.num_ops] = reads[-1] = 0
    if work.messages.is_explicit:
        reads[:] = 0
    counts: list[int] = reads.tolist()
    return counts


def _flows(work: Work) -> Ints:
    """Number the flow of each arrival; arrivals of one flow share buffers."""
    arrivals, program = work.needs.arrivals, work.schedule.program
    fact, stage = ValueNumbers.of(program).fact_and_stage(arrivals.value)
    key = (fact * program.num_stages + stage) * program.num_devices + arrivals.device
    key = key * len(work.schedule.lanes) + work.columns.lane[arrivals.maker]
    flow: Ints = np.unique(key, return_inverse=True)[1]
    return flow
