"""Order the messages of all devices so that each device can post its own in one queue.

The schedule is played without a clock. A message is sent and received in one moment,
and sends follow the op that made the value:

    d0  0F0 │0SEND_F0│     0F1 │0SEND_F1  0RECV_B0│ 0B0    these two cross: both devices
    d1      │1RECV_F0│ 1F0 1B0 │1RECV_F1  1SEND_B0│ 1F1    post them as one group

So the events of all devices have one order in time, which contains the order of each
device. The earliest event that is left is never blocked, so no queue waits for ever.

A receive is late: it stands just before the op that needs its value. It is earlier only
where its sender, and so everything else, would wait for ever.

Ops that several devices do together (a sum over copies of a stage, updates of a gate)
start in one moment, too. Replicas play the same queues: let all of them do each event
in the same moment, and a sum over replicas finds every member.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from hocket.core.dataflow import Value
from hocket.core.gates import Gates, stage_gates
from hocket.core.op import Kind, Op
from hocket.core.plans.lane_plan import Message, OpPlan
from hocket.core.program import Program
from hocket.errors import DeadlockError

# Messages of one pair of devices that both post at once (`batch_isend_irecv`).
Group: TypeAlias = tuple[Message, ...]
# The ops of a device and its messages, in the order in which the host issues them.
Queue: TypeAlias = list[OpPlan | Group]
# The stages whose ops of a kind wait for one another, by kind and each of the stages.
Together: TypeAlias = Mapping[tuple[Kind, int], tuple[int, ...]]
# Ops that wait for one another: their kind, their stages, and the step; or messages
# that two devices exchange.
Barrier: TypeAlias = tuple[Kind, tuple[int, ...], int] | frozenset[Message]
What = TypeVar("What")


class Receives(Enum):
    """When a device posts the receive of a message."""

    AT_ONCE = "when the value is made, as torch.distributed.pipelining does"
    LATE = "before the op that needs the value"


@dataclass(frozen=True, slots=True)
class Item(Generic[What]):
    """One entry of a lane.

    Args:
        what: an op, or ops that start together.
        device: the lane's device.
        needs: the values that must be on the device before it starts.
        makes: the values that are on the device afterwards.
        sends: the messages that leave afterwards, in this order.
        ops: its ops, if other entries name them in `follows`.
        follows: ops of other entries that must have been done before.
        barrier: the barrier that it stands at: a device goes on when each device has
            come to an item of this barrier.
    """

    what: What
    device: int
    needs: tuple[Value, ...] = ()
    makes: tuple[Value, ...] = ()
    sends: tuple[Message, ...] = ()
    ops: tuple[Op, ...] = ()
    follows: tuple[Op, ...] = ()
    barrier: Barrier | None = None


def ops_together(program: Program, gates: Gates = ()) -> Together:
    """Return which ops of several devices wait for one another.

    The sum of gradients over copies of a stage (R) is one collective of NCCL, whose
    kernels end when all are there. Updates of a gate (U) wait for its norm.

    Args:
        program: with its copies.
        gates: the stages whose gradients are judged together.
    """
    found = {(Kind.REDUCE, n): group for group in program.copies for n in group}
    found |= {(Kind.UPDATE, n): gate for n, gate in stage_gates(gates).items()}
    return found


def plan_queues(
    lanes: Sequence[Sequence[OpPlan]],
    devices: Sequence[int],
    together: Together | None = None,
) -> dict[int, Queue]:
    """Put messages between the ops of each device, as every rank plans them.

    Args:
        lanes: the ops of each lane, or of a portion of it. The values of an earlier
            portion are on the devices that need them.
        devices: the device of each lane.
        together: see `ops_together`. A device that has come to one of these ops does
            nothing before all others have; None: there are no such ops.

    Returns:
        The queue of each device. All messages that are sent are also received.

    Raises:
        DeadlockError: ops wait for each other's values.
    """
    queues: dict[int, Queue] = {device: [] for device in devices}
    items = [
        [op_item(plan, device, together) for plan in lane]
        for lane, device in zip(lanes, devices, strict=True)
    ]
    for event in play_messages(items, Receives.LATE):
        if isinstance(event, Item):
            queues[event.device].append(event.what)
        else:
            queues[event[0].from_device].append(event)
            queues[event[0].to_device].append(event)
    return queues


def op_item(plan: OpPlan, device: int, together: Together | None) -> Item[OpPlan]:
    """Return an op as an entry of its lane, at its barrier; see `ops_together`."""
    op = plan.op
    stages = (together or {}).get((op.kind, op.stage))
    barrier = None if stages is None else (op.kind, stages, op.step)
    return Item(
        plan, device, plan.needed, plan.made, plan.sends, (op,), plan.follows, barrier
    )


def play_messages(
    lanes: Sequence[Sequence[Item[What]]], receives: Receives
) -> Iterator[Item[What] | Group]:
    """Yield the items of all lanes and their messages, in one order.

    Args:
        lanes: the items of each lane. Values that none of them makes are there.
        receives: when a message is received.

    Raises:
        DeadlockError: items wait for each other's values.
    """
    return _Play(lanes, receives).events()


class _Play(Generic[What]):
    """Lanes take turns, and each begins its next item if it can.

    Args:
        lanes: see `play_messages`.
        receives: see `play_messages`.
    """

    def __init__(
        self, lanes: Sequence[Sequence[Item[What]]], receives: Receives
    ) -> None:
        self._left = [deque(lane) for lane in lanes]
        self._receives = receives
        self._due: defaultdict[int, set[Value]] = defaultdict(set)  # by device
        self._unsent: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._unsent_devices: deque[int] = deque()  # of each message, oldest first
        self._undone = {op for lane in lanes for item in lane for op in item.ops}
        # The devices of each barrier; none once the first of them goes on.
        self._members: defaultdict[Barrier, set[int]] = defaultdict(set)
        for item in (item for lane in lanes for item in lane):
            if item.barrier is not None:
                self._members[item.barrier].add(item.device)
            self._due[item.device].update(item.makes)
            for message in item.sends:
                self._due[message.to_device].add(message.value)

    def events(self) -> Iterator[Item[What] | Group]:
        """Yield all events; see `play_messages`."""
        while any(self._left) or self._unsent_devices:
            moved = False
            for lane in self._left:
                if lane and self._may_begin(lane[0]):
                    moved = True
                    yield from self._play(lane.popleft())
            for group in self._needed_or_crossing():
                moved = True
                yield group
            if not moved:
                yield self._oldest()

    def _may_begin(self, item: Item[What]) -> bool:
        if not self._is_free_for(item):
            return False
        if item.barrier is None:
            return True
        waiting_at = {
            lane[0].device
            for lane in self._left
            if lane and lane[0].barrier == item.barrier and self._is_free_for(lane[0])
        }
        return waiting_at >= self._members[item.barrier]

    def _is_free_for(self, item: Item[What]) -> bool:
        return (
            not self._unsent[item.device]
            and self._due[item.device].isdisjoint(item.needs)
            and self._undone.isdisjoint(item.follows)
        )

    def _play(self, item: Item[What]) -> Iterator[Item[What] | Group]:
        self._due[item.device].difference_update(item.makes)
        self._undone.difference_update(item.ops)
        if item.barrier is not None:
            self._members[item.barrier].clear()  # all are there, so all may go on
        yield item
        for message in item.sends:
            if self._receives is Receives.AT_ONCE:
                self._due[message.to_device].discard(message.value)
                yield (message,)
            else:
                self._unsent[item.device].append(message)
                self._unsent_devices.append(item.device)

    def _needed_or_crossing(self) -> Iterator[Group]:
        """Send what a waiting device needs, and the messages of two that cross."""
        for device in sorted(set(self._unsent_devices)):
            if not self._unsent[device]:
                continue  # sent together with another device's
            message = self._unsent[device][0]
            other = message.to_device
            if not self._unsent[other]:
                if self._is_next(message):
                    yield self._send(device)
            elif self._unsent[other][0].to_device == device:
                yield (*self._send(device), *self._send(other))

    def _is_next(self, message: Message) -> bool:
        """Return whether the next item of a lane needs a message."""
        return any(
            lane
            and lane[0].device == message.to_device
            and message.value in lane[0].needs
            for lane in self._left
        )

    def _oldest(self) -> Group:
        """Send the message that waits longest, before its receiver needs it."""
        if not self._unsent_devices:
            heads = [lane[0] for lane in self._left if lane]
            waiting = (
                f"  d{x.device} stands at {' '.join(map(str, x.ops)) or x.what}"
                for x in heads
            )
            raise DeadlockError(("no op can begin, each waits for another:", *waiting))
        return self._send(self._unsent_devices[0])

    def _send(self, device: int) -> Group:
        message = self._unsent[device].popleft()
        self._unsent_devices.remove(device)
        self._due[message.to_device].discard(message.value)
        return (message,)
