"""Write messages into a schedule: a send and a receive where a value must travel.

    d0  0F0        0F1        ...         d0  0F0 0SEND_F0>1 0F1 0SEND_F1>1 ...
    d1       1F0        1F1   ...   ──▶   d1  1RECV_F0<0 1RECV_F1<0 1F0 1RECV_F2<0 1F1

A message is one value on its way along one flow, forward (SEND_F) or backward (SEND_B).
Both its ops are asynchronous: the lane goes on at once. A value leaves as soon as it is
made. Its receive is posted as early as one of the flow's buffers is free, and a buffer
is free again when the last op that needs the value has ended.

Such posts are safe because both ends agree on an order. Messages between two lanes are
posted in the order in which they *can go*, in a simulated run with equal stages: when
they are made, or when there is a buffer, whichever is later. In that run every message
goes as soon as both ends have posted it, so one run at least ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final, NamedTuple

from hocket.core.costs import Costs, StageCost
from hocket.core.dataflow import Fact, Value, is_sent, makes, needs
from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError
from hocket.passes.segments import filtered, refuse_messages

# Every op that makes or reads a message takes time, so that no two tie on one lane.
_EQUAL_STAGES: Final = Costs(
    (StageCost(1.0, 1.0, 1.0, 1.0, 1.0),), is_device_share=True
)

_KINDS: Final = {
    Fact.OUTPUT: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
    Fact.INPUT_GRAD: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}


class _Place(NamedTuple):
    """An op in its lane."""

    lane: int
    position: int


# Messages that share their receive buffers: the value, the stage and the two lanes.
_Flow = tuple[Fact, int, int, int, int]

# When a message can go; the rest makes the order the same at both ends.
_Order = tuple[float, float, _Place, int]


@dataclass(frozen=True, slots=True)
class _Message:
    """One value on its way along one flow.

    Args:
        value: what it carries.
        to_stage: the stage whose ops read it.
        maker: the op that makes the value.
        reader: the first op that reads it.
        last_reader: the last one, on the same lane.
    """

    value: Value
    to_stage: int
    maker: _Place
    reader: _Place
    last_reader: _Place

    @property
    def flow(self) -> _Flow:
        """What the message belongs to."""
        ends = self.maker.lane, self.reader.lane
        return self.value.fact, self.value.stage, self.to_stage, *ends

    @property
    def ops(self) -> tuple[Op, Op]:
        """The send and the receive."""
        send, receive = _KINDS[self.value.fact]
        _, from_stage, microbatch, step = self.value
        return (
            Op(send, from_stage, microbatch, step, peer=self.to_stage),
            Op(receive, self.to_stage, microbatch, step, peer=from_stage),
        )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message, where its receive may stand at the earliest, and when it can go."""

    message: _Message
    buffer_from: int
    order: _Order


def add_messages(
    schedule: Schedule, *, num_buffers: int = 2, shared_channel: bool = False
) -> Schedule:
    """Write a send and a receive for every value that goes from device to device.

    Args:
        schedule: a schedule without messages and deadlocks.
        num_buffers: receive buffers of each flow in each direction. A flow that needs
            more has more: its values are not read in the order in which they are made,
            or a whole-batch loss reads many at once.
        shared_channel: whether both directions between two lanes go through one queue,
            as over a single NCCL communicator, so that both ends post sends and
            receives in one order. Otherwise each direction has a queue of its own, and
            no receive waits for a send.

    Returns:
        The same order with messages. Its body keeps those repetitions that are alike
        with their messages, too.

    Raises:
        PlanError: there are messages already, or no buffers.
        DeadlockError: the schedule has a deadlock.

    >>> from hocket.schedules import make_schedule
    >>> schedule = make_schedule("gpipe", num_devices=2, num_microbatches=2)
    >>> print(add_messages(schedule))
    d0  0RECV_B0<1 0RECV_B1<1 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0B0 0B1 0U
    d1  1RECV_F0<0 1RECV_F1<0 1F0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1U
    """
    if num_buffers < 1:
        raise PlanError(f"num_buffers is {num_buffers}, and must be at least 1")
    refuse_messages(schedule)
    ends_s = [ends.tolist() for ends in simulate(schedule, _EQUAL_STAGES).end_s]
    flows: dict[_Flow, list[_Message]] = defaultdict(list)
    for message in _messages(schedule):
        flows[message.flow].append(message)
    channels: dict[object, list[_Transfer]] = defaultdict(list)
    for (*_, from_lane, to_lane), messages in flows.items():
        ends = (from_lane, to_lane)
        channel = frozenset(ends) if shared_channel else ends
        channels[channel] += _transfers(messages, num_buffers, ends_s)
    return _with_inserted(schedule, _posts(channels.values()))


def drop_messages(schedule: Schedule) -> Schedule:
    r"""Return the order of work alone, as it was before `add_messages`.

    Of a repeating body, those repetitions stay that were alike with their messages.

    >>> lines = "d0  0F0 0SEND_F0>1", "d1  1RECV_F0<0 1F0"
    >>> print(drop_messages(Schedule.parse("\n".join(lines))))
    d0  0F0
    d1  1F0
    """
    return filtered(schedule, lambda op: op.kind not in MESSAGES)


def _messages(schedule: Schedule) -> list[_Message]:
    """Return every message that the order needs, in the order of first readers.

    Raises:
        PlanError: two lanes of a stage read one value.
    """
    program = schedule.program
    messages: dict[tuple[Value, int], _Message] = {}
    makers = {
        value: _Place(i, j)
        for i, lane in enumerate(schedule.lanes)
        for j, op in enumerate(lane.ops)
        for value in makes(op, program)
    }
    for i, lane in enumerate(schedule.lanes):
        for j, op in enumerate(lane.ops):
            for value in needs(op, program):
                if not is_sent(value, lane.device, program):
                    continue
                _refuse_gathered(value)
                key, here = (value, op.stage), _Place(i, j)
                before = messages.get(key)
                if before and before.reader.lane != i:
                    raise PlanError(
                        f"{value} is read by {op} and by an op of another lane, but a "
                        "message as op has one lane that receives it: leave messages "
                        "implicit, or put the stage's forwards on one lane"
                    )
                first = before.reader if before else here
                messages[key] = _Message(value, op.stage, makers[value], first, here)
    return list(messages.values())


def _refuse_gathered(value: Value) -> None:
    if value.fact not in _KINDS:
        raise PlanError(
            f"{value} goes to another device, but a message as op carries one "
            "microbatch: leave messages implicit, or put both stages on one device"
        )


def _transfers(
    messages: list[_Message], num_buffers: int, ends_s: list[list[float]]
) -> Iterator[_Transfer]:
    """Yield one flow's messages in the sender's order, each with a buffer.

    A message takes the buffer of the one that is read first, once that is read.
    """
    messages = sorted(messages, key=lambda message: message.maker)
    num_buffers = max(num_buffers, _buffers_needed(messages))
    taken: list[int] = []  # a heap: for each taken buffer, the op that will free it
    for message in messages:
        freed_by = heappop(taken) if len(taken) == num_buffers else -1
        heappush(taken, message.last_reader.position)
        made_s = ends_s[message.maker.lane][message.maker.position]
        free_s = ends_s[message.reader.lane][freed_by] if freed_by >= 0 else 0.0
        order = max(made_s, free_s), made_s, message.maker, message.to_stage
        yield _Transfer(message, freed_by + 1, order)


def _buffers_needed(messages: Sequence[_Message]) -> int:
    """Return how many messages of a flow are held at once, by where they are read."""
    most, earlier = 1, list[int]()
    for message in messages:
        reader = message.reader.position
        num_held = len(earlier) - bisect_left(earlier, reader)  # read now or later
        most = max(most, num_held + 1)
        insort(earlier, message.last_reader.position)
    return most


def _posts(channels: Iterable[list[_Transfer]]) -> dict[_Place, list[Op]]:
    """Return what is posted before which op of which lane."""
    posts: dict[_Place, list[tuple[_Order, Op]]] = defaultdict(list)
    for transfers in channels:
        last: dict[int, int] = defaultdict(int)  # where each lane posted last
        for transfer in sorted(transfers, key=lambda transfer: transfer.order):
            message = transfer.message
            send, receive = message.ops
            for lane, earliest, op in (
                (message.maker.lane, message.maker.position + 1, send),
                (message.reader.lane, transfer.buffer_from, receive),
            ):
                last[lane] = max(last[lane], earliest)
                posts[_Place(lane, last[lane])].append((transfer.order, op))
            assert last[message.reader.lane] <= message.reader.position
    return {place: [op for _, op in sorted(ops)] for place, ops in posts.items()}


def _with_inserted(schedule: Schedule, posts: dict[_Place, list[Op]]) -> Schedule:
    lanes, moved_to = [], []
    for i, lane in enumerate(schedule.lanes):
        ops: list[Op] = []
        now_at = []  # where each op of the lane, and its end, are now
        for j in range(len(lane.ops) + 1):
            ops += posts.get(_Place(i, j), ())
            now_at.append(len(ops))
            ops += lane.ops[j : j + 1]
        lanes.append(replace(lane, ops=tuple(ops)))
        moved_to.append(now_at)
    if not schedule.body:
        return replace(schedule, lanes=tuple(lanes))
    starts = [
        [now_at[k] for k in schedule.repetitions(i)]
        for i, now_at in enumerate(moved_to)
    ]
    first, last = _longest_alike(lanes, starts)
    body = tuple((of_lane[first], of_lane[last]) for of_lane in starts)
    return Schedule(schedule.program, tuple(lanes), body, last - first)


def _longest_alike(lanes: list[Lane], starts: list[list[int]]) -> tuple[int, int]:
    """Return the longest run of repetitions that differ only by one step each time.

    The first and the last ones may differ from the others, because of messages from the
    prologue and to the epilogue.
    """
    num_repeats = len(starts[0]) - 1
    runs, first = [], 0
    for i in range(1, num_repeats + 1):
        if i == num_repeats or not all(
            [op.later(1) for op in lane.ops[a:b]] == [*lane.ops[b:c]]
            for lane, (a, b, c) in zip(
                lanes, (of_lane[i - 1 : i + 2] for of_lane in starts), strict=True
            )
        ):
            runs.append((first, i))
            first = i
    return max(runs, key=lambda run: run[1] - run[0])
