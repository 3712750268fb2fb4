"""Point-to-point messages of one worker: their channels, order, tags and schemas.

Every value that a device makes and another one reads is one message, in a channel of
its stage and kind:

    device of stage a ──F a>b──▶ device of stage b
                      ◀─B b>a───

A channel's messages come in the order in which the sender's lanes make them, so the
receiver can have buffers ready before they are sent. What a message holds (shapes and
types) is agreed once per shape signature, through the store, and is part of every tag,
together with the step, the microbatch and a digest of the batch. The first output of a
step in each channel follows a header, by which workers with different batches find out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch.distributed as dist
from torch import Tensor

from hocket.core.dataflow import Fact
from hocket.core.lane_plan import Message
from hocket.core.schedule import Schedule
from hocket.run.comm.schema import Schema, message_tag, schema_of
from hocket.run.comm.schema_exchange import ChannelEnd, agree_on_schema
from hocket.run.comm.step_header import HEADER, StepHeader, check_same_header
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport
from hocket.run.data.step_batch import Batches
from hocket.run.engine.play_plan import PlayPlan, Portion, PortionPlan

Signature = int  # of a message's shapes: the number of samples in the microbatch
Route = tuple[Fact, int, int]  # fact, stage that makes it, device that reads it
# Of each fact and stage: the step (within a portion) and microbatch of its messages.
Orders = dict[tuple[Fact, int], list[tuple[int, int]]]
StepKey = tuple[int, int]  # the step's number, its batch's first microbatch

_HEADER: Final = -1  # in the place of a microbatch: what comes before all of a step
_LETTERS: Final = {Fact.OUTPUT: "F", Fact.INPUT_GRAD: "B"}


@dataclass(slots=True)
class _Outgoing:
    """A channel that this worker sends into.

    Args:
        channel: its name and ends.
        sender: its end here.
        schemas: the schemas that are agreed.
        headers: the steps whose header goes before their first message.
    """

    channel: Channel
    sender: Sender
    schemas: dict[Signature, Schema] = field(default_factory=dict)
    headers: set[StepKey] = field(default_factory=set)


@dataclass(slots=True)
class _Incoming:
    """A channel that this worker receives from.

    Args:
        channel: its name and ends.
        receiver: its end here.
        schemas: the schemas that are agreed.
        coming: the step and microbatch of messages that the receiver does not expect
            yet; `_HEADER` for a step's header.
        tags: the tags of those that it expects, by step and microbatch, until released.
        headers: the steps whose header is not announced yet.
        unread: the steps whose header is not read yet.
    """

    channel: Channel
    receiver: Receiver
    schemas: dict[Signature, Schema] = field(default_factory=dict)
    coming: deque[tuple[StepHeader, int]] = field(default_factory=deque)
    tags: dict[tuple[int, int], int] = field(default_factory=dict)
    headers: set[StepKey] = field(default_factory=set)
    unread: set[StepKey] = field(default_factory=set)


class PointToPoint:
    """Sends and receives the values that cross devices.

    Args:
        plan: what is played; of all devices.
        device: this worker's.
        ranks: the rank of each device in this replica.
        transport: carries the messages.
        store: where schemas are agreed.
        prefix: begins the names of channels; differs between training and evaluation.
        timeout_s: after which a wait ends.
    """

    def __init__(
        self,
        plan: PlayPlan,
        device: int,
        ranks: Sequence[int],
        transport: Transport,
        store: dist.Store,
        *,
        prefix: str,
        timeout_s: float,
    ) -> None:
        self._device = device
        self._store = store
        self._timeout_s = timeout_s
        self._nets = [stage.net for stage in plan.program.stages]
        # Equal schemas are one object, so that they are found at once.
        self._known: dict[Schema, Schema] = {}
        self._out: dict[Route, _Outgoing] = {}
        self._in: dict[tuple[Fact, int], _Incoming] = {}
        for (fact, stage, to_device), message in _routes(plan):
            from_device = message.from_device
            (a, b), *_ = message.flows
            name = f"{prefix}{_LETTERS[fact]}{a}>{b}"
            channel = Channel(name, ranks[from_device], ranks[to_device])
            if from_device == device:
                sender = transport.sender(channel)
                self._out[fact, stage, to_device] = _Outgoing(channel, sender)
            elif to_device == device:
                receiver = transport.receiver(channel)
                self._in[fact, stage] = _Incoming(channel, receiver)

    def begin(self, steps: Mapping[str, StepHeader]) -> None:
        """Begin a batch: a header goes before its first output in each channel.

        Args:
            steps: each net's header.
        """
        for (fact, stage, _), outgoing in self._out.items():
            if fact is Fact.OUTPUT:
                outgoing.headers.add(_key(steps[self._nets[stage]]))
        for (fact, stage), incoming in self._in.items():
            if fact is Fact.OUTPUT:
                incoming.headers.add(_key(steps[self._nets[stage]]))

    def orders_of(self, part: PortionPlan, schedule: Schedule) -> Orders:
        """Return in which order the messages of a portion come to this worker.

        Args:
            part: the portion; its messages go through channels that are there.
            schedule: the schedule that it is of.
        """
        found: Orders = {key: [] for key in self._in}
        for device in range(schedule.program.num_devices):
            for _, op in part.in_order(schedule.lanes_of(device), schedule.program):
                for message in op.sends:
                    key = message.value.fact, message.value.stage
                    if message.to_device == self._device:
                        assert op.op.microbatch is not None
                        place = op.op.step - part.shift, op.op.microbatch
                        found[key].append(place)
        return found

    def expect(self, orders: Orders, first: int, batches: Batches) -> None:
        """Have buffers ready for a portion's messages, as far as shapes are agreed.

        A batch may have fewer microbatches than the schedule (the last one in
        evaluation); those that it has come in the schedule's order.

        Args:
            orders: of the portion that is about to be played, as `orders_of` says.
            first: the step that the portion's step 0 is.
            batches: the batches under way, by step and net.
        """
        for (fact, stage), incoming in self._in.items():
            net = self._nets[stage]
            for relative, microbatch in orders[fact, stage]:
                step = batches[first + relative][net].step
                if microbatch >= len(step.sizes):
                    continue
                key = _key(step)
                if key in incoming.headers:
                    incoming.headers.remove(key)
                    incoming.unread.add(key)
                    incoming.coming.append((step, _HEADER))
                incoming.coming.append((step, microbatch))
            self._expect(incoming)

    def send(
        self, route: Route, step: StepHeader, microbatch: int, values: Sequence[Tensor]
    ) -> None:
        """Send what an op made; the values must not be changed afterwards."""
        outgoing = self._out[route]
        if outgoing.headers and (key := _key(step)) in outgoing.headers:
            outgoing.headers.remove(key)
            outgoing.sender.send(_header_tag(step), (step.header(),), HEADER)
        size = step.sizes[microbatch]
        schema = outgoing.schemas.get(size)
        if schema is None:
            schema = schema_of(values)
            agree_on_schema(
                self._store,
                outgoing.channel,
                str(size),
                schema,
                ChannelEnd.SENDER,
                self._timeout_s,
            )
            schema = outgoing.schemas[size] = self._known.setdefault(schema, schema)
        outgoing.sender.send(_tag(schema, step, microbatch), values, schema)

    def receive(
        self, fact: Fact, stage: int, step: StepHeader, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Wait for a value of another device; it stays valid until `release`.

        Raises:
            WaitError: it did not come within the timeout, or the sender is gone.
            SchemaError: something else came, or the two sides' batches differ.
        """
        incoming = self._in[fact, stage]
        if incoming.unread and (key := _key(step)) in incoming.unread:
            incoming.unread.remove(key)
            self._read_header(incoming, step)
        if incoming.coming:
            self._expect_until(incoming, step, microbatch)
        return incoming.receiver.receive(incoming.tags[step.number, microbatch])

    def release(
        self, fact: Fact, stage: int, step: StepHeader, microbatch: int
    ) -> None:
        """Give back the buffer of a message that is no longer needed."""
        incoming = self._in[fact, stage]
        incoming.receiver.release(incoming.tags.pop((step.number, microbatch)))

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            WaitError: something did not leave within the timeout.
        """
        for outgoing in self._out.values():
            outgoing.sender.flush(self._timeout_s)

    def _read_header(self, incoming: _Incoming, step: StepHeader) -> None:
        tag = _header_tag(step)
        (header,) = incoming.receiver.receive(tag)
        ends = incoming.channel
        check_same_header(step.header(), ends.to_rank, header, ends.from_rank)
        incoming.receiver.release(tag)

    def _expect_until(
        self, incoming: _Incoming, step: StepHeader, microbatch: int
    ) -> None:
        """Look up the shapes of a message, and of those that are made before it."""
        while (step, microbatch) in incoming.coming:
            first, number = incoming.coming[0]
            size = first.sizes[number]
            schema = agree_on_schema(
                self._store,
                incoming.channel,
                str(size),
                None,
                ChannelEnd.RECEIVER,
                self._timeout_s,
            )
            incoming.schemas[size] = self._known.setdefault(schema, schema)
            self._expect(incoming)

    def _expect(self, incoming: _Incoming) -> None:
        """Announce coming messages in order, up to the first of an unknown shape."""
        while incoming.coming:
            step, microbatch = incoming.coming[0]
            if microbatch == _HEADER:
                incoming.receiver.expect([_header_tag(step)], HEADER)
            else:
                schema = incoming.schemas.get(step.sizes[microbatch])
                if schema is None:
                    return
                tag = _tag(schema, step, microbatch)
                incoming.tags[step.number, microbatch] = tag
                incoming.receiver.expect([tag], schema)
            incoming.coming.popleft()


def _key(step: StepHeader) -> StepKey:
    return step.number, step.first


def _tag(schema: Schema, step: StepHeader, microbatch: int) -> int:
    return message_tag(schema, step.number, step.first + microbatch, step.salt)


def _header_tag(step: StepHeader) -> int:
    return message_tag(HEADER, step.number, step.first)


def _routes(plan: PlayPlan) -> Iterator[tuple[Route, Message]]:
    """Every channel, in one order on all workers, with one of its messages."""
    found: dict[Route, Message] = {}
    for lane in plan.portions[Portion.STEP].lanes:
        for op in lane:
            for message in op.sends:
                value = message.value
                route = value.fact, value.stage, message.to_device
                found.setdefault(route, message)
    letters = list(_LETTERS)
    yield from sorted(
        found.items(), key=lambda one: (letters.index(one[0][0]), *one[0][1:])
    )
