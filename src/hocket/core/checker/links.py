"""Name the models of links, and prove an order of messages under the strictest one.

    RENDEZVOUS    gloo: messages are paired by name, each channel waits by itself
    ONE_QUEUE     NCCL: messages of a pair of devices are paired by their order, and a
                  message blocks all that its device was given after it

A send or receive of NCCL is a kernel that spins until the peer has the matching one.
CUDA does not promise that streams of a device progress independently: with few hardware
queues, a waiting kernel may hold up the very op that the peer waits for. So ONE_QUEUE
gives each device one queue, of its ops and messages in the order of issue. A plan that
ends in this model also ends with several streams: they remove waits and add none.

So do collectives: a sum over copies of a stage holds up its device until all of them
are there, and an update those of its gate. Sums over replicas are not in the model and
need not be: replicas have equal queues, so what ends for one ends for all in step.

Source: CUDA C++ Programming Guide, "Implicit Synchronization"; NCCL User Guide,
"Group Calls" and "Point-to-point communication".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum

from hocket.core.dataflow import Value
from hocket.core.op import Op
from hocket.core.plans.lane_plan import OpPlan
from hocket.core.plans.message_order import Barrier, Group, Queue, Together, barrier_of
from hocket.errors import DeadlockError, ScheduleError


class Links(Enum):
    """How messages of two devices wait for each other."""

    RENDEZVOUS = "rendezvous"
    ONE_QUEUE = "one queue"


def check_queues(queues: Mapping[int, Queue], together: Together | None = None) -> None:
    """Prove that all devices come to the end of their queues, under `ONE_QUEUE`.

    Nothing is assumed of the order in which messages stand.

    Args:
        queues: the ops and messages of each device, in the order of issue.
        together: the ops of several devices that wait for one another; see
            `plan_queues`.

    Raises:
        ScheduleError: a message is missing at one end, or the two ends of a pair have
            different orders; names the devices, both groups and their number.
        DeadlockError: the devices wait for each other; names where each stands.
    """
    faults = [*_missing(queues), *_order_faults(queues)]
    if faults:
        raise ScheduleError(tuple(faults))
    positions = _Play(queues, together).positions
    if any(positions[device] < len(queue) for device, queue in queues.items()):
        raise DeadlockError(
            ("no device can go on, each waits for another:",),
            "\n".join(_picture(queues, positions)),
        )


def _missing(queues: Mapping[int, Queue]) -> Iterator[str]:
    """Find messages that do not stand once at each of their ends."""
    for device, queue in queues.items():
        posted = Counter(
            message
            for group in queue
            if not isinstance(group, OpPlan)
            for message in group
        )
        due = {
            message
            for other in queues.values()
            for plan in other
            if isinstance(plan, OpPlan)
            for message in plan.sends
            if device in (message.from_device, message.to_device)
        }
        for message in sorted(due | set(posted), key=str):
            count = posted[message] if message in due else -posted[message]
            if count != 1:
                found = f"{count} times" if count >= 0 else "though no op makes it"
                yield (
                    f"device {device} posts {message.value}, from device "
                    f"{message.from_device} to device {message.to_device}, {found}"
                )


def _order_faults(queues: Mapping[int, Queue]) -> Iterator[str]:
    """Find the first groups of each pair that differ at its two ends."""
    of_pair: dict[tuple[int, int], list[Group]] = defaultdict(list)
    for device, queue in queues.items():
        for group in queue:
            if not isinstance(group, OpPlan):
                of_pair[device, _peer(group, device)].append(group)
    for (device, peer), groups in sorted(of_pair.items()):
        if device > peer:
            continue
        for number, (a, b) in enumerate(
            zip(groups, of_pair[peer, device], strict=False)
        ):
            if set(a) != set(b):
                yield (
                    f"as group {number} of the messages between devices {device} and "
                    f"{peer}, device {device} posts {_text(a, device)}, and device "
                    f"{peer} posts {_text(b, peer)}: NCCL pairs them by their order"
                )
                break


class _Play:
    """Plays the queues of all devices; see `check_queues`.

    Attributes:
        positions: how far each device has come in its queue.
    """

    def __init__(self, queues: Mapping[int, Queue], together: Together | None) -> None:
        self.positions = dict.fromkeys(queues, 0)
        self._queues = queues
        self._due = {
            device: _values_at_end(device, queue) for device, queue in queues.items()
        }
        self._together = together
        self._undone: set[Op] = set()
        # The devices of each barrier that have not come to it.
        self._absent: defaultdict[Barrier | None, set[int]] = defaultdict(set)
        for device, queue in queues.items():
            for item in queue:
                if isinstance(item, OpPlan):
                    self._undone.add(item.op)
                    barrier = barrier_of(item.op, self._together)
                    if barrier is not None:
                        self._absent[barrier].add(device)
        while any(self._move(device) for device in queues):
            pass

    def _head(self, device: int) -> OpPlan | Group | None:
        queue, place = self._queues[device], self.positions[device]
        return queue[place] if place < len(queue) else None

    def _move(self, device: int) -> bool:
        """Do the first item that is left, if it can be done."""
        match self._head(device):
            case None:
                return False
            case OpPlan() as plan:
                can = self._due[device].isdisjoint(plan.needed)
                can = can and self._undone.isdisjoint(plan.follows)
                absent = self._absent[barrier_of(plan.op, self._together)]
                if can and absent:
                    comes = device in absent
                    absent.discard(device)
                    return comes
                if can:
                    self._undone.discard(plan.op)
                    self._due[device].difference_update(plan.made)
                    self.positions[device] += 1
                return can
            case group:
                return self._exchange(group, device, _peer(group, device))

    def _exchange(self, group: Group, device: int, peer: int) -> bool:
        """Move messages, if both devices stand at them and their values are made."""
        other = self._head(peer)
        if other is None or isinstance(other, OpPlan) or set(other) != set(group):
            return False
        if any(m.value in self._due[m.from_device] for m in group):
            return False
        for message in group:
            self._due[message.to_device].discard(message.value)
        self.positions[device] += 1
        self.positions[peer] += 1
        return True


def _values_at_end(device: int, queue: Queue) -> set[Value]:
    """Return the values that a device has once its queue has ended."""
    return {
        value
        for item in queue
        for value in (
            item.made
            if isinstance(item, OpPlan)
            else [m.value for m in item if m.to_device == device]
        )
    }


def _peer(group: Group, device: int) -> int:
    first = group[0]
    return first.to_device if first.from_device == device else first.from_device


def _text(group: Group, device: int) -> str:
    """Write a group as one of its devices posts it."""
    return " and ".join(
        f"the send of {message.value} to device {message.to_device}"
        if message.from_device == device
        else f"the receive of {message.value} from device {message.from_device}"
        for message in group
    )


def _picture(
    queues: Mapping[int, Queue], positions: Mapping[int, int]
) -> Iterator[str]:
    """Yield what each device waits in, and the op that it did last."""
    for device, queue in queues.items():
        place = positions[device]
        if place == len(queue):
            continue
        ops = [item.op for item in queue[:place] if isinstance(item, OpPlan)]
        after = f"after {ops[-1]}" if ops else "at the beginning"
        item = queue[place]
        what = str(item.op) if isinstance(item, OpPlan) else _text(item, device)
        yield f"  d{device} stands at {what}, item {place} of {len(queue)}, {after}"
