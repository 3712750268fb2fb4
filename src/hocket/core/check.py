"""Find everything that is wrong with a schedule, and show it in the picture.

What is proved of a schedule that passes:

1. every op that the program wants is there exactly once, on its own device;
2. played under rendezvous sends and bounded receive buffers, every lane comes to its
   end;
3. every forward, and its backward, read the weights that the stage's delay promises,
   and so many versions of them must be alive;
4. ops that change one thing in place (gradients, buffers) have a path of events between
   them, in whichever lanes they are;
5. explicit messages are posted in the same order at both ends of each pair of devices,
   and collectives on all devices that share a group;
6. the body of a flush-free order is the same work, one step later, each time;
7. sharded stages are whole where their weights are read, and nowhere else (see
   `checker.gathers`);
8. for links that need one (`Links.ONE_QUEUE`, as of NCCL): the messages of all devices
   have an order in which every device comes to its end.

Find ops that change one thing in place without a path of events between them.

Check that all members of a collective post it in the same order.

    d0  ... 3R ... 0R       stage 3 is a copy of stage 1, and stage 0 of stage 2:
    d1  ... 1R ... 2R       both devices post the pair 1, 3 before the pair 0, 2

The members of a collective are the replicas of a device, which play the same lanes, and
the devices of stages that are copies of one another. NCCL matches calls by their order
alone: where two members differ, gradients of different stages would be added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from hocket.core.accesses import Access, Resource
from hocket.core.checker.faults import (
    Fault,
    body_faults,
    message_order_faults,
    op_faults,
    too_much_due,
)
from hocket.core.checker.gathers import gather_faults
from hocket.core.checker.happens_before import (
    RESOURCES,
    Accesses,
    HappensBefore,
    count_alive,
    find_accesses,
)
from hocket.core.checker.links import Links, check_queues
from hocket.core.costs import Costs
from hocket.core.op import COLLECTIVES, Kind, Op
from hocket.core.plans.lane_plan import Plans, plan_lanes, plan_portions
from hocket.core.plans.message_order import ops_together, plan_queues
from hocket.core.schedule import Schedule
from hocket.core.simulator.clocks import Stand, stands
from hocket.core.simulator.columns import Columns, ValueNumbers
from hocket.core.simulator.needs import UNREAD
from hocket.core.simulator.work import Work, prepare
from hocket.core.timelines.arrays import Ints
from hocket.core.walk import Walk
from hocket.errors import DeadlockError, ScheduleError


@dataclass(frozen=True, slots=True)
class Proof:
    """What `check` found out about a schedule that may run.

    Args:
        num_buffers: the fewest receive buffers per flow with which it never waits
            for ever, even where a send ends only when the other side has a buffer.
            One lane has such buffers of its own at each device that it sends to.
        num_versions: the most versions of each stage's weights that are alive at once,
            over every order of ops that lanes and values allow.
        num_gradients: the most steps of each stage whose gradients are begun and not
            yet used by an update, over every such order; 0 if it is not trained.
    """

    num_buffers: int
    num_versions: tuple[int, ...]
    num_gradients: tuple[int, ...]


def check(
    schedule: Schedule,
    *,
    num_buffers: int | None = None,
    links: Links = Links.RENDEZVOUS,
) -> Proof:
    """Prove that a schedule may run, or say everything that is wrong with it.

    Args:
        schedule: any schedule; nothing about it is assumed.
        num_buffers: receive buffers per flow that must suffice; the fewest that do are
            found when not given.
        links: the strictest links that it must run on. `ONE_QUEUE` holds for an order
            without explicit messages; their order is planned.

    Raises:
        PlanError: the links are `ONE_QUEUE`, and there are explicit messages.
        ScheduleError: with all faults, and the picture.
        DeadlockError: it is complete, but lanes wait for each other.
    """
    _refuse(
        schedule,
        too_much_due(schedule)
        or [
            *op_faults(schedule),
            *body_faults(schedule),
            *gather_faults(schedule),
        ],
    )
    work = prepare(schedule, Costs.uniform())
    played = play(work, num_buffers)
    _refuse_stuck(schedule, played.stuck)
    accesses = find_accesses(work.columns, schedule.program)
    before = HappensBefore(work.columns, work.needs, played.order)
    _refuse(
        schedule,
        [
            *message_order_faults(schedule),
            *collective_faults(work, before, played.order),
            *conflicts(work.columns, accesses, before, played.order),
        ],
    )
    if links is Links.ONE_QUEUE:
        _check_message_order(schedule)
    alive = count_alive(schedule.program, work.columns, accesses, before)
    return Proof(played.num_buffers, *alive)


def _check_message_order(schedule: Schedule) -> None:
    """Plan the messages of each portion that is played at a time, and prove them."""
    devices = [lane.device for lane in schedule.lanes]
    plans: Sequence[Plans] = [plan_lanes(schedule)]
    if schedule.body:
        plans = plan_portions(schedule)[1:]
    together = ops_together(schedule.program)
    for lanes in plans:
        check_queues(plan_queues(lanes, devices, together), together)


def _refuse(schedule: Schedule, faults: list[Fault]) -> None:
    if faults:
        raise ScheduleError(
            tuple(text for text, _ in faults),
            _picture(schedule, wrong={op for _, op in faults if op is not None}),
        )


def _refuse_stuck(schedule: Schedule, stuck: list[Stand]) -> None:
    if stuck:
        sentences = ("no lane can move, each waits for another:", *map(str, stuck))
        stands = {stand.lane: stand.position for stand in stuck}
        raise DeadlockError(sentences, _picture(schedule, stands=stands))


def _picture(
    schedule: Schedule,
    *,
    wrong: set[Op] | None = None,
    stands: dict[int, int] | None = None,
) -> str:
    """Write the lanes, with marks."""
    lines = []
    for i, lane in enumerate(schedule.lanes):
        words = [f"! {op}" if wrong and op in wrong else str(op) for op in lane.ops]
        if stands is not None and i in stands:
            words.insert(stands[i], ">")
        lines.append(f"{lane.label}  {' '.join(words)}")
    return "\n".join(lines)


def conflicts(
    columns: Columns, accesses: Accesses, before: HappensBefore, order: Sequence[int]
) -> Iterator[Fault]:
    """Name the first conflict of each resource, stage and pair of lanes.

    Gradients and buffers must be changed by one op after another in every order. An op
    that reads gradients (U) needs their values, and so comes after all changes. Weights
    have no conflicts: their versions are counted (see `alive`).

    Args:
        columns: the ops of a schedule that is complete and free of deadlock.
        accesses: what they read and change.
        before: the paths of events between them.
        order: all rows, in one order in which they may start.
    """
    found = set()
    changes = _in_order(_shared_by_lanes(accesses, columns), order)
    lanes = columns.lane[changes.row].tolist()
    keys = changes.resource, changes.stage, changes.number, changes.row
    rows = zip(*(column.tolist() for column in keys), lanes, strict=True)
    for (*one, first, lane), (*other, second, next_lane) in pairwise(rows):
        if one != other or before.before(first, second):
            continue
        resource, stage, number = one
        access = Access(RESOURCES[resource], stage, number, writes=True)
        key = resource, stage, frozenset((lane, next_lane))
        if key not in found:
            found.add(key)
            yield _fault(columns, (first, second), access)


def _shared_by_lanes(accesses: Accesses, columns: Columns) -> Accesses:
    """Return the changes of gradients and buffers that several lanes make."""
    changes = accesses.writes & ~accesses.of(Resource.WEIGHTS)
    accesses = accesses.taken(changes)
    key = accesses.stage * len(RESOURCES) + accesses.resource
    lane = columns.lane[accesses.row]
    least = np.full(key.max(initial=0) + 1, columns.num_ops)
    most = np.full(least.size, -1)
    np.minimum.at(least, key, lane)
    np.maximum.at(most, key, lane)
    return accesses.taken((least != most)[key])


def _in_order(accesses: Accesses, order: Sequence[int]) -> Accesses:
    """Sort accesses by what they use, and then by the order in which ops may start.

    Then comparing neighbours is enough: if each of them happens before the next one,
    that is their only order.
    """
    place: Ints = np.empty(len(order), np.int64)
    place[np.array(order, np.int64)] = np.arange(len(order))
    keys = place[accesses.row], accesses.number, accesses.stage, accesses.resource
    return accesses.taken(np.lexsort(keys))


def _fault(columns: Columns, rows: tuple[int, int], access: Access) -> Fault:
    first, second = map(columns.describe, rows)
    return (
        f"{first} and {second} both change {access} and no path of events orders them: "
        "put both in one lane, or let one need, directly or through other ops, a value "
        "that the other makes",
        columns.op(rows[1]),
    )


def collective_faults(
    work: Work, before: HappensBefore, order: Sequence[int]
) -> Iterator[Fault]:
    """Find lanes or devices that may post collectives in different orders.

    Args:
        work: a schedule that is complete and free of deadlock.
        before: the paths of events between its ops.
        order: all rows, in one order in which they may start.
    """
    columns = work.columns
    is_collective = columns.is_any(COLLECTIVES)
    if not is_collective.any():
        return
    rows = np.array(order, np.int64)
    of_device: dict[int, list[int]] = defaultdict(list)
    for row in rows[is_collective[rows]].tolist():
        of_device[int(columns.device[row])].append(row)
    for device, posts in of_device.items():
        yield from _lane_faults(work, before, device, posts)
    yield from _device_faults(work, of_device)


def _lane_faults(
    work: Work, before: HappensBefore, device: int, posts: Sequence[int]
) -> Iterator[Fault]:
    """Find the first two collectives of a device that no path of events orders."""
    for first, second in pairwise(posts):
        if not before.before(first, second):
            a, b = map(work.columns.describe, (first, second))
            yield (
                f"device {device} may post {a} and {b} in either order, but "
                "its replicas or copies must post them in the same one: put both in "
                "one lane",
                work.columns.op(second),
            )
            return


def _device_faults(work: Work, of_device: dict[int, list[int]]) -> Iterator[Fault]:
    """Find the first collectives that two devices post in different orders."""
    copies_of = work.schedule.program.copies_of
    # What makes two devices' ops one collective: the kind, the stages and the step. The
    # shards of a stage are one device of the schedule: each of its gathers is alone.
    calls = {
        device: {
            (op.kind, copies_of[op.stage], op.step): op
            for op in map(work.columns.op, posts)
            if op.kind is not Kind.UNSHARD
        }
        for device, posts in sorted(of_device.items())
    }
    for (one, ops), (other, others) in combinations(calls.items(), 2):
        mine = [call for call in ops if call in others]
        theirs = [call for call in others if call in ops]
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                yield (
                    f"device {one} posts {ops[a]} as collective {place} of those that "
                    f"it shares with device {other}, which posts {others[b]} there: "
                    "post them in the same order on both devices",
                    ops[a],
                )
                break


# Play a schedule without a clock, under the strictest rule for messages.
#
# A send is a rendezvous: the lane that made a value goes on only when the receiver has
# a buffer for it. A buffer is taken when its message is sent and released when the op
# that needs the value starts. An order that ends under this rule ends under every
# weaker one (sends that do not wait, messages that are buffered on the way).
#
# Messages share buffers if one lane sends them, and they bring values of one kind and
# stage to one device. So no two lanes compete for a buffer, and whether all lanes end
# does not depend on which of them is faster.
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
    played = CheckedOrder(work, num_buffers or 1)
    played.run()
    while num_buffers is None and played.add_buffer():
        played.run()
    return played


class CheckedOrder:
    """How far the lanes came: what has come, and which buffers are taken.

    An item of a lane is the row of an op; or the number of ops and an arrival, where
    the lane sends what it made. A lane waits for an item; or, below 0, for a flow.

    Attributes:
        num_buffers: receive buffers per flow.
        order: the rows of all ops that started, in the order in which they did.
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

    @property
    def stuck(self) -> list[Stand]:
        """The lanes that did not end, each with its reason; none if all ended."""
        heads, makers = self.walk.heads, self.work.needs.arrivals.maker
        rows = {
            lane: item if item < self.num_ops else int(makers[item - self.num_ops])
            for lane, item in heads.items()
        }
        return [*stands(self.work, rows, lambda lane: self._reason(heads[lane]))]

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
