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
from dataclasses import replace
from enum import Enum
from typing import Any

from hocket.core.plans.lane_plan import OpPlan
from hocket.core.plans.message_order import (
    Group,
    Item,
    Queue,
    Receives,
    Together,
    op_item,
    play_messages,
)
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
    lanes = [
        [_item(entry, device, together) for entry in queue]
        for device, queue in queues.items()
    ]
    positions = dict.fromkeys(queues, 0)
    try:
        for event in play_messages(lanes, Receives.AT_ONCE):
            assert isinstance(event, Item), "messages are entries of the queues"
            positions[event.device] += 1
    except DeadlockError:
        raise DeadlockError(
            ("no device can go on, each waits for another:",),
            "\n".join(_picture(queues, positions)),
        ) from None


def _item(entry: OpPlan | Group, device: int, together: Together | None) -> Item[Any]:
    """Return an op; or messages, which both devices exchange in one moment."""
    if isinstance(entry, OpPlan):
        return replace(op_item(entry, device, together), sends=())
    sent = tuple(x.value for x in entry if x.from_device == device)
    received = tuple(x.value for x in entry if x.to_device == device)
    return Item(entry, device, sent, received, barrier=frozenset(entry))


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
