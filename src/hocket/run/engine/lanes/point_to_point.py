"""Point-to-point messages of one worker: their channels, order, tags and schemas.

Every value that a device makes and another one reads is one message, in a channel of
its stage and kind:

    device of stage a ──F a>b──▶ device of stage b
                      ◀─B b>a───

Each of the sender's lanes has a channel of its own, whose messages come in the lane's
order, so the receiver can have buffers ready before they are sent. What a message holds
(shapes and types) is agreed once per shape signature, through the store, and is part of
every tag, together with the step, the microbatch and a digest of the batch. The first
output of a step in each channel follows a header, by which workers with different
batches find out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hocket.core.dataflow import Fact
from hocket.core.lane_plan import Message
from hocket.core.program import Program
from hocket.errors import WaitError
from hocket.run.comm.schema import Schema, message_tag, schema_of
from hocket.run.comm.schema_exchange import ChannelEnd, agree_on_schema, schema_key
from hocket.run.comm.step_header import HEADER, StepHeader, check_same_header
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport
from hocket.run.data.step_batch import Batches, NetBatches
from hocket.run.engine.lanes.play_plan import PlayPlan, PortionPlan

# What a message's shapes follow from: numbers of samples.
Signature = int | tuple[int, ...]
Route = tuple[Fact, int, int]  # fact, stage that makes it, device that reads it
Source = tuple[Fact, int, int]  # fact, stage that makes it, lane that sends it
# Of each source: the step (within a portion) and microbatch of its messages.
Orders = dict[Source, list[tuple[int, int]]]
StepKey = tuple[int, int]  # the step's number, its batch's first microbatch

WHOLE_BATCH: Final = 0  # in the place of a microbatch: a value that is one per step
_HEADER: Final = -1  # in the place of a microbatch: what comes before all of a step
_LETTERS: Final = {Fact.OUTPUT: "F", Fact.INPUT_GRAD: "B", Fact.GATHERED: "G"}
_FIRST_PAUSE_S: Final = 2e-5
_LAST_PAUSE_S: Final = 1e-3


class _Coming(NamedTuple):
    """A message on its way; `_HEADER` in the place of a microbatch for a header."""

    step: StepHeader
    microbatch: int
    signature: Signature


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
        coming: messages that the receiver does not expect yet.
        tags: the tags of those that it expects, by step and microbatch, until released.
        headers: the steps whose header is not announced yet.
        unread: the steps whose header is not read yet.
    """

    channel: Channel
    receiver: Receiver
    schemas: dict[Signature, Schema] = field(default_factory=dict)
    coming: deque[_Coming] = field(default_factory=deque)
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
        self._out: dict[tuple[Route, int], _Outgoing] = {}
        self._in: dict[Source, _Incoming] = {}
        self._sized_by: dict[tuple[Fact, int, int], tuple[str, ...]] = {}
        # The channel of each message, where several lanes make a stage's.
        self._from: dict[tuple[Fact, int], dict[tuple[int, int], _Incoming]] = {}
        self._only: dict[tuple[Fact, int], _Incoming] = {}
        # Receivers, which share buffers, are used by one lane of this device at a time.
        self._takes_turns = len(plan.schedule.lanes_of(device)) > 1
        self._turn: AbstractContextManager[object] = (
            threading.RLock() if self._takes_turns else nullcontext()
        )
        for (fact, stage, to_device), message in _routes(plan):
            from_device, lane = message.from_device, message.from_lane
            (a, b), *_ = message.flows
            name = f"{prefix}{_LETTERS[fact]}{a}>{b}"
            if lane != plan.schedule.lanes_of(from_device)[0]:
                name += f" of lane {lane}"
            route = fact, stage, to_device
            self._sized_by[route] = _nets_that_size(plan.program, route)
            channel = Channel(name, ranks[from_device], ranks[to_device])
            if from_device == device:
                sender = transport.sender(channel)
                self._out[route, lane] = _Outgoing(channel, sender)
            elif to_device == device:
                incoming = _Incoming(channel, transport.receiver(channel))
                self._in[fact, stage, lane] = incoming
                if (fact, stage) in self._only:
                    self._from[fact, stage] = {}
                self._only[fact, stage] = incoming

    def begin(self, steps: Mapping[str, StepHeader]) -> None:
        """Begin a batch: a header goes before its first output in each channel.

        Args:
            steps: each net's header.
        """
        for ((fact, stage, _), _lane), outgoing in self._out.items():
            if fact is Fact.OUTPUT:
                outgoing.headers.add(_key(steps[self._nets[stage]]))
        for (fact, stage, _), incoming in self._in.items():
            if fact is Fact.OUTPUT:
                incoming.headers.add(_key(steps[self._nets[stage]]))

    def orders_of(self, part: PortionPlan) -> Orders:
        """Return in which order the messages of a portion come to this worker.

        Args:
            part: the portion; its messages go through channels that are there.
        """
        found: Orders = {key: [] for key in self._in}
        for lane in part.lanes:
            for op in lane:
                for message in op.sends:
                    value = message.value
                    if message.to_device == self._device:
                        index = op.op.microbatch
                        place = (
                            op.op.step - part.shift,
                            WHOLE_BATCH if index is None else index,
                        )
                        found[value.fact, value.stage, message.from_lane].append(place)
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
        for source, incoming in self._in.items():
            fact, stage, _ = source
            net = self._nets[stage]
            channels = self._from.get((fact, stage))
            for relative, microbatch in orders[source]:
                batch = batches[first + relative]
                step = batch[net].step
                if microbatch >= len(step.sizes):
                    continue
                key = _key(step)
                if key in incoming.headers:
                    incoming.headers.remove(key)
                    incoming.unread.add(key)
                    incoming.coming.append(_Coming(step, _HEADER, 0))
                signature = self._signature(
                    (fact, stage, self._device), batch, microbatch
                )
                incoming.coming.append(_Coming(step, microbatch, signature))
                if channels is not None:
                    channels[step.number, microbatch] = incoming
            self._expect(incoming)

    def send(
        self,
        route: Route,
        lane: int,
        batch: NetBatches,
        microbatch: int,
        values: Sequence[Tensor],
    ) -> None:
        """Send what an op made; the values must not be changed afterwards.

        Args:
            route: what it is, and where it goes.
            lane: the lane that the op is in.
            batch: the batch of each net.
            microbatch: the microbatch; `WHOLE_BATCH` for a value that is one per step.
            values: the tensors.
        """
        outgoing = self._out[route, lane]
        step = batch[self._nets[route[1]]].step
        if outgoing.headers and (key := _key(step)) in outgoing.headers:
            outgoing.headers.remove(key)
            outgoing.sender.send(_header_tag(step), (step.header(),), HEADER)
        signature = self._signature(route, batch, microbatch)
        schema = outgoing.schemas.get(signature)
        if schema is None:
            schema = schema_of(values)
            agree_on_schema(
                self._store,
                outgoing.channel,
                str(signature),
                schema,
                ChannelEnd.SENDER,
                self._timeout_s,
            )
            schema = outgoing.schemas[signature] = self._known.setdefault(
                schema, schema
            )
        outgoing.sender.send(_tag(schema, step, microbatch), values, schema)

    def receive(
        self, fact: Fact, stage: int, batch: NetBatches, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Wait for a value of another device; it stays valid until `release`.

        Raises:
            WaitError: it did not come within the timeout, or the sender is gone.
            SchemaError: something else came, or the two sides' batches differ.
        """
        step = batch[self._nets[stage]].step
        incoming = self._incoming(fact, stage, step, microbatch)
        if self._takes_turns:
            return self._poll(incoming, step, microbatch)
        if incoming.unread and (key := _key(step)) in incoming.unread:
            self._expect_until(incoming, step, _HEADER)
            incoming.unread.remove(key)
            self._read_header(incoming, step)
        if incoming.coming:
            self._expect_until(incoming, step, microbatch)
        return incoming.receiver.receive(incoming.tags[step.number, microbatch])

    def release(
        self, fact: Fact, stage: int, batch: NetBatches, microbatch: int
    ) -> None:
        """Give back the buffer of a message that is no longer needed."""
        step = batch[self._nets[stage]].step
        incoming = self._incoming(fact, stage, step, microbatch)
        if stage_channels := self._from.get((fact, stage)):
            del stage_channels[step.number, microbatch]
        with self._turn:
            incoming.receiver.release(incoming.tags.pop((step.number, microbatch)))

    def _incoming(
        self, fact: Fact, stage: int, step: StepHeader, microbatch: int
    ) -> _Incoming:
        channels = self._from.get((fact, stage))
        if channels is None:
            return self._only[fact, stage]
        return channels[step.number, microbatch]

    def _signature(self, route: Route, batch: NetBatches, microbatch: int) -> Signature:
        """Return what the shapes of a message follow from."""
        nets = self._sized_by[route]
        if route[0] is Fact.GATHERED:
            return batch[nets[0]].step.num_samples
        if len(nets) == 1:
            return batch[nets[0]].step.sizes[microbatch]
        sizes = [batch[net].step.sizes for net in nets]
        return tuple(x[microbatch] if microbatch < len(x) else 0 for x in sizes)

    def _poll(
        self, incoming: _Incoming, step: StepHeader, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Receive without keeping other lanes, whose ops the sender may wait for."""
        until_s, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            with self._turn:
                if self._has_come(incoming, step, microbatch):
                    tag = incoming.tags[step.number, microbatch]
                    return incoming.receiver.receive(tag)
            if time.monotonic() >= until_s:
                channel = incoming.channel
                raise WaitError(
                    f"{channel}: waited {self._timeout_s:.1f} s for microbatch "
                    f"{microbatch} of step {step.number}; rank {channel.from_rank} is "
                    "gone, stuck, or slower than the timeout allows"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _has_come(self, incoming: _Incoming, step: StepHeader, microbatch: int) -> bool:
        """Whether a message can be received without a wait; reads its header."""
        key = _key(step)
        if key in incoming.unread:
            if not self._is_expected(incoming, step, _HEADER):
                return False
            if not incoming.receiver.ready(_header_tag(step)):
                return False
            incoming.unread.remove(key)
            self._read_header(incoming, step)
        return self._is_expected(
            incoming, step, microbatch
        ) and incoming.receiver.ready(incoming.tags[step.number, microbatch])

    def _is_expected(
        self, incoming: _Incoming, step: StepHeader, microbatch: int
    ) -> bool:
        """Whether the receiver expects a message; looks up shapes that are known."""
        while _is_among(incoming.coming, step, microbatch):
            signature = str(incoming.coming[0].signature)
            if not self._store.check([schema_key(incoming.channel, signature)]):
                return False
            self._agree(incoming)
        return True

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
        while _is_among(incoming.coming, step, microbatch):
            self._agree(incoming)

    def _agree(self, incoming: _Incoming) -> None:
        """Look up the shapes of the first message that is not expected yet."""
        signature = incoming.coming[0].signature
        schema = agree_on_schema(
            self._store,
            incoming.channel,
            str(signature),
            None,
            ChannelEnd.RECEIVER,
            self._timeout_s,
        )
        incoming.schemas[signature] = self._known.setdefault(schema, schema)
        self._expect(incoming)

    def _expect(self, incoming: _Incoming) -> None:
        """Announce coming messages in order, up to the first of an unknown shape."""
        while incoming.coming:
            step, microbatch, signature = incoming.coming[0]
            if microbatch == _HEADER:
                incoming.receiver.expect([_header_tag(step)], HEADER)
            else:
                schema = incoming.schemas.get(signature)
                if schema is None:
                    return
                tag = _tag(schema, step, microbatch)
                incoming.tags[step.number, microbatch] = tag
                incoming.receiver.expect([tag], schema)
            incoming.coming.popleft()


def _is_among(coming: Sequence[_Coming], step: StepHeader, microbatch: int) -> bool:
    return any(x.step is step and x.microbatch == microbatch for x in coming)


def _nets_that_size(program: Program, route: Route) -> tuple[str, ...]:
    """Return the nets whose microbatches say how many samples a message has.

    These are the net that makes an output, and the nets that read a gradient of theirs.
    """
    fact, stage, device = route
    if fact is not Fact.INPUT_GRAD:
        return (program.stages[stage].net,)
    readers = [program.stages[source] for source in program.sources[stage]]
    nets = [x.net for x in readers if x.device == device and x.trainable]
    return tuple(dict.fromkeys(nets))


def _key(step: StepHeader) -> StepKey:
    return step.number, step.first


def _tag(schema: Schema, step: StepHeader, microbatch: int) -> int:
    return message_tag(schema, step.number, step.first + microbatch, step.salt)


def _header_tag(step: StepHeader) -> int:
    return message_tag(HEADER, step.number, step.first)


def _routes(plan: PlayPlan) -> Iterator[tuple[Route, Message]]:
    """Every channel, in one order on all workers, with one of its messages."""
    found: dict[tuple[Route, int], Message] = {}
    for part in plan.portions.values():
        for lane in part.lanes:
            for op in lane:
                for message in op.sends:
                    value = message.value
                    route = value.fact, value.stage, message.to_device
                    found.setdefault((route, message.from_lane), message)
    letters = list(_LETTERS)
    for (route, _), message in sorted(
        found.items(),
        key=lambda one: (letters.index(one[0][0][0]), *one[0][0][1:], one[0][1]),
    ):
        yield route, message
