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

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

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
    is_sending: bool

    def __str__(self) -> str:
        """One line of an error."""
        return f"  {self.label} stands at {self.reason}"


@dataclass(frozen=True, slots=True)
class CheckedOrder:
    """How far the lanes came.

    Args:
        order: the rows of all ops that started, in the order in which they did.
        stuck: where deadlocked lanes stand; empty if all lanes ended.
    """

    order: list[int]
    stuck: list[Stand]


def play(work: Work, num_buffers: int) -> CheckedOrder:
    """Run every lane as far as it goes.

    Args:
        work: a complete schedule (see `op_faults`), with any costs.
        num_buffers: receive buffers per flow: messages that may wait at the receiver.
    """
    state = _State(work, num_buffers)
    runnable = list(range(len(work.schedule.lanes)))[::-1]
    while runnable:
        state.advance(runnable.pop())
        runnable += state.woken
        state.woken.clear()
    return CheckedOrder(state.order, list(state.stuck()))


class _State:
    def __init__(self, work: Work, num_buffers: int) -> None:
        self.work = work
        self.num_buffers = num_buffers
        self.num_ops = work.columns.num_ops
        self.row = list(work.columns.first[:-1])  # of each lane's next op
        self.stop = work.columns.first[1:]
        self.has = bytearray(work.num_items)
        self.order: list[int] = []
        self.woken: list[int] = []
        self.waiting: dict[int, list[int]] = {}  # item -> lanes

        # Messages; both ends post one where they are ops of the schedule.
        self.is_explicit = work.messages.is_explicit
        self.arrival = work.messages.arrival.tolist()
        self.posts_left = [2] * work.messages.num_messages
        self.unsent: list[list[int]] = [[] for _ in self.row]  # arrivals, last first

        # Receive buffers.
        self.flow = _flows(work).tolist()
        self.in_buffers: defaultdict[int, int] = defaultdict(int)  # by flow
        self.full: dict[int, list[int]] = {}  # flow -> lanes that want to send
        arrived = np.array(work.wait_item, np.int64) - self.num_ops
        num_arrivals = len(self.flow)
        arrived = arrived[(arrived >= 0) & (arrived < num_arrivals)]
        self.reads_left = np.bincount(arrived, minlength=num_arrivals).tolist()

    def advance(self, lane: int) -> None:
        """Run one lane as far as it goes now."""
        work, has = self.work, self.has
        while self._send(lane):
            row = self.row[lane]
            if row == self.stop[lane]:
                return
            items = work.wait_item[work.wait_from[row] : work.wait_from[row + 1]]
            for item in items:
                if not has[item]:
                    self.waiting.setdefault(item, []).append(lane)
                    return
            self.row[lane] = row + 1
            self.order.append(row)
            self._read(items)
            self._come(row)
            self._post(lane, row)

    def stuck(self) -> Iterator[Stand]:
        """Yield the lanes that did not end, each with its reason."""
        for number, lane in enumerate(self.work.schedule.lanes):
            row, unsent = self.row[number], self.unsent[number]
            if unsent:
                row, reason = row - 1, self._cannot_send(unsent[-1])
            elif row < self.stop[number]:
                reason = self.work.describe_wait(row, self.has.__getitem__)
            else:
                continue
            position = row - self.work.columns.first[number]
            text = f"{lane.ops[position]} and {reason}"
            yield Stand(number, lane.label, position, text, bool(unsent))

    def _cannot_send(self, arrival: int) -> str:
        arrivals = self.work.needs.arrivals
        value = ValueNumbers.of(self.work.schedule.program).value(
            int(arrivals.value[arrival])
        )
        return (
            f"cannot send {value} to device {arrivals.device[arrival]}: all "
            f"{self.num_buffers} receive buffers there hold unread messages"
        )

    def _come(self, item: int) -> None:
        self.has[item] = 1
        if item in self.waiting:
            self.woken += self.waiting.pop(item)

    def _read(self, items: list[int]) -> None:
        """Free the buffers of messages that no later op reads."""
        for item in items:
            arrival = item - self.num_ops
            if arrival < 0 or self.is_explicit:
                continue
            self.reads_left[arrival] -= 1
            if not self.reads_left[arrival]:
                flow = self.flow[arrival]
                self.in_buffers[flow] -= 1
                self.woken += self.full.pop(flow, ())

    def _post(self, lane: int, row: int) -> None:
        """Post what an op sends or receives; it arrives once both ends posted it."""
        begin, end = self.work.post_from[row : row + 2]
        for message in self.work.post_message[begin:end]:
            arrival = self.arrival[message]
            if not self.is_explicit:
                self.unsent[lane].insert(0, arrival)
                continue
            self.posts_left[message] -= 1
            if not self.posts_left[message] and arrival != UNREAD:
                self._come(self.num_ops + arrival)

    def _send(self, lane: int) -> bool:
        """Send what the last op made; return whether all of it is sent."""
        unsent = self.unsent[lane]
        while unsent:
            flow = self.flow[unsent[-1]]
            if self.in_buffers[flow] >= self.num_buffers:
                self.full.setdefault(flow, []).append(lane)
                return False
            self.in_buffers[flow] += 1
            self._come(self.num_ops + unsent.pop())
        return True


def _flows(work: Work) -> Ints:
    """Number the flow of each arrival; arrivals of one flow share buffers."""
    arrivals, program = work.needs.arrivals, work.schedule.program
    fact, stage = ValueNumbers.of(program).fact_and_stage(arrivals.value)
    key = (fact * program.num_stages + stage) * program.num_devices + arrivals.device
    key = key * len(work.schedule.lanes) + work.columns.lane[arrivals.maker]
    flow: Ints = np.unique(key, return_inverse=True)[1]
    return flow
