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
from itertools import pairwise

import numpy as np

from hocket.core.simulator.clocks import Stand, stands
from hocket.core.simulator.columns import ValueNumbers
from hocket.core.simulator.messages import UNREAD
from hocket.core.simulator.work import Work
from hocket.core.timelines.arrays import Ints
from hocket.core.walk import Walk


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


class _State:
    """What has come, and which buffers are taken.

    An item of a lane is the row of an op; or the number of ops and an arrival, where
    the lane sends what it made. A lane waits for an item; or, below 0, for a flow.
    """

    def __init__(self, work: Work, num_buffers: int) -> None:
        self.work = work
        self.num_buffers = num_buffers
        self.num_ops = work.columns.num_ops
        self.has = bytearray(work.num_items)
        self.order: list[int] = []

        # Messages that are ops of the schedule; both ends post one.
        self.is_explicit = work.messages.is_explicit
        self.arrival = work.messages.arrival.tolist()
        self.posts_left = [2] * work.messages.num_messages

        # Receive buffers; one lane sends all messages of a flow.
        self.flow = _flows(work).tolist()
        self.in_buffers = [0] * (1 + max(self.flow, default=0))  # by flow
        self.reads_left = _reads(work)  # by item
        lanes = [[*self._items(*ends)] for ends in pairwise(work.columns.first)]
        self.walk = Walk(lanes, self._lacks)

    def run(self) -> None:
        """Run all lanes that can, until none can."""
        has, waiting, num_ops = self.has, self.walk.waiting, self.num_ops
        for _, item in self.walk:
            if item < num_ops:
                self.order.append(item)
                self._free(item)
            else:
                self.in_buffers[self.flow[item - num_ops]] += 1
            has[item] = 1
            if item in waiting:
                self.walk.come(item)
            if self.is_explicit:
                self._post(item)

    def add_buffer(self) -> bool:
        """Add one to the buffers of each flow; return whether a lane waits for it."""
        full = [flow for flow in self.walk.waiting if flow < 0]
        for flow in full:
            self.walk.come(flow)
        self.num_buffers += bool(full)
        return bool(full)

    def stuck(self) -> Iterator[Stand]:
        """Yield the lanes that did not end, each with its reason."""
        heads, makers = self.walk.heads, self.work.needs.arrivals.maker
        rows = {
            lane: item if item < self.num_ops else int(makers[item - self.num_ops])
            for lane, item in heads.items()
        }
        return stands(self.work, rows, lambda lane: self._reason(heads[lane]))

    def _items(self, begin: int, end: int) -> Iterator[int]:
        """Yield the items of a lane: a send follows its op."""
        work = self.work
        for row in range(begin, end):
            yield row
            if not self.is_explicit:  # arrival `i` is brought by message `i`
                for i in work.post_message[
                    work.post_from[row] : work.post_from[row + 1]
                ]:
                    yield self.num_ops + i

    def _lacks(self, item: int) -> int | None:
        """Return what an item waits for: another one, or a buffer of its flow."""
        if item >= self.num_ops:
            flow = self.flow[item - self.num_ops]
            return -1 - flow if self.in_buffers[flow] >= self.num_buffers else None
        has, wait_from = self.has, self.work.wait_from
        for needed in self.work.wait_item[wait_from[item] : wait_from[item + 1]]:
            if not has[needed]:
                return needed
        return None

    def _reason(self, item: int) -> str:
        if item < self.num_ops:
            return self.work.describe_wait(item, self.has.__getitem__)
        arrivals, number = self.work.needs.arrivals, item - self.num_ops
        numbers = ValueNumbers.of(self.work.schedule.program)
        value = numbers.value(int(arrivals.value[number]))
        return (
            f"cannot send {value} to device {arrivals.device[number]}: all "
            f"{self.num_buffers} receive buffers there hold unread messages"
        )

    def _free(self, row: int) -> None:
        """Free the buffers of messages that no op behind this one reads."""
        work, reads_left = self.work, self.reads_left
        for item in work.wait_item[work.wait_from[row] : work.wait_from[row + 1]]:
            reads_left[item] -= 1
            if not reads_left[item]:
                flow = self.flow[item - self.num_ops]
                self.in_buffers[flow] -= 1
                self.walk.come(-1 - flow)

    def _post(self, row: int) -> None:
        """Post what an op sends or receives; it arrives once both ends posted it."""
        begin, end = self.work.post_from[row : row + 2]
        for message in self.work.post_message[begin:end]:
            self.posts_left[message] -= 1
            arrival = self.arrival[message]
            if not self.posts_left[message] and arrival != UNREAD:
                self.has[self.num_ops + arrival] = 1
                self.walk.come(self.num_ops + arrival)


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
