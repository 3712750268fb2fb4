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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hocket.core.dataflow import Fact
from hocket.core.op import STEP_ENDS
from hocket.core.plans.lane_plan import Message, OpPlan
from hocket.core.program import Program
from hocket.run.comm.step_header import StepHeader
from hocket.run.comm.transport import Carries, Channel, Post, Transport
from hocket.run.data.step_batch import Batches, NetBatches
from hocket.run.device.device import Device
from hocket.run.engine.lanes.channel_ends import (
    Incoming,
    Outgoing,
    Schemas,
    SharedReceivers,
    Signature,
)
from hocket.run.engine.lanes.planned_messages import plan_messages, refuse_unordered
from hocket.run.engine.lanes.play_plan import PlayPlan, PortionPlan

Route = tuple[Fact, int, int]  # fact, stage that makes it, device that reads it
Source = tuple[Fact, int, int]  # fact, stage that makes it, lane that sends it
Place = tuple[int, int]  # the step (within a portion) and microbatch of a message


class Orders(NamedTuple):
    """The order of a portion's messages.

    Args:
        arrivals: the places of each source's messages, in the order in which they come.
        groups: all messages of this device, in the order in which it posts them, if the
            transport needs it; those of a group together. Empty at the places of R and
            U.
    """

    arrivals: dict[Source, list[Place]]
    groups: list[list[tuple[Message, Place]]]


_PAUSE_S: Final = 5e-5  # while there is something to do meanwhile
WHOLE_BATCH: Final = 0  # in the place of a microbatch: a value that is one per step
_LETTERS: Final = {Fact.OUTPUT: "F", Fact.INPUT_GRAD: "B", Fact.GATHERED: "G"}


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
        lanes: the device's lanes, where it has several.

    Attributes:
        meanwhile: called while a message is waited for, as long as it returns True.

    Raises:
        RunError: the transport needs an order of messages, and there is none.
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
        lanes: Device | None = None,
    ) -> None:
        self.meanwhile: Callable[[], bool] = _nothing
        self._device = device
        self._transport = transport
        self._plan = plan
        if transport.needs_order:
            refuse_unordered(plan)
        self._nets = [stage.net for stage in plan.program.stages]
        schemas = Schemas(store, timeout_s)
        self._timeout_s = timeout_s
        self._out: dict[tuple[Route, int], Outgoing] = {}
        self._in: dict[Source, Incoming] = {}
        self._sized_by: dict[tuple[Fact, int, int], tuple[str, ...]] = {}
        # The channel of each message, where several lanes make a stage's.
        self._from: dict[tuple[Fact, int], dict[tuple[int, int], Incoming]] = {}
        self._only: dict[tuple[Fact, int], Incoming] = {}
        shared = None
        if lanes is not None:
            shared = SharedReceivers(threading.RLock(), partial(self._check, lanes))
        for (fact, stage, to_device), message in _routes(plan):
            from_device, lane = message.from_device, message.from_lane
            (a, b), *_ = message.flows
            name = f"{prefix}{_LETTERS[fact]}{a}>{b}"
            if lane != plan.schedule.lanes_of(from_device)[0]:
                name += f" of lane {lane}"
            route = fact, stage, to_device
            self._sized_by[route] = _nets_that_size(plan.program, route)
            ends = ranks[from_device], ranks[to_device]
            channel = Channel(name, *ends, Carries.PLANNED)
            if from_device == device:
                sender = transport.sender(channel)
                self._out[route, lane] = Outgoing(channel, sender, schemas)
            elif to_device == device:
                receiver = transport.receiver(channel)
                incoming = Incoming(channel, receiver, schemas, shared)
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
                outgoing.begin(steps[self._nets[stage]])
        for (fact, stage, _), incoming in self._in.items():
            if fact is Fact.OUTPUT:
                incoming.begin(steps[self._nets[stage]])

    def orders_of(self, part: PortionPlan) -> Orders:
        """Return in which order the messages of a portion come to this worker.

        Args:
            part: the portion; its messages go through channels that are there.
        """
        found: dict[Source, list[Place]] = {key: [] for key in self._in}
        for lane in part.lanes:
            for op in lane:
                for message in op.sends:
                    value = message.value
                    if message.to_device == self._device:
                        place = _place(message, part)
                        found[value.fact, value.stage, message.from_lane].append(place)
        if not self._transport.needs_order:
            return Orders(found, [])
        queues = plan_messages(self._plan, part)
        groups = [
            []
            if isinstance(item, OpPlan)
            else [(message, _place(message, part)) for message in item]
            for item in queues[self._device]
            if not isinstance(item, OpPlan) or item.op.kind in STEP_ENDS
        ]
        return Orders(found, groups)

    def expect(self, orders: Orders, first: int, batches: Batches) -> None:
        """Have buffers ready for a portion's messages, as far as shapes are agreed.

        A batch may have fewer microbatches than the schedule (the last one in
        evaluation); those that it has come in the schedule's order.

        Args:
            orders: the messages of the portion that is about to be played, as
                `orders_of` returns them.
            first: the step that the portion's step 0 is.
            batches: the batches under way, by step and net.
        """
        for source, incoming in self._in.items():
            fact, stage, _ = source
            net = self._nets[stage]
            channels = self._from.get((fact, stage))
            for relative, microbatch in orders.arrivals[source]:
                batch = batches[first + relative]
                step = batch[net].step
                if microbatch >= len(step.sizes):
                    continue
                route = fact, stage, self._device
                signature = self._signature(route, batch, microbatch)
                incoming.add(step, microbatch, signature)
                if channels is not None:
                    channels[step.place_of(microbatch)] = incoming
            incoming.announce()
        if orders.groups:
            groups = [
                [
                    self._post(message)
                    for message, (relative, microbatch) in group
                    if microbatch < len(self._sizes(message, batches[first + relative]))
                ]
                for group in orders.groups
            ]
            self._transport.plan(
                [
                    group
                    for group, planned in zip(groups, orders.groups, strict=True)
                    if group or not planned
                ]
            )

    def _post(self, message: Message) -> Post:
        fact, stage, *_ = message.value
        if message.from_device == self._device:
            return self._out[(fact, stage, message.to_device), message.from_lane].post()
        return self._in[fact, stage, message.from_lane].post()

    def _sizes(self, message: Message, batch: NetBatches) -> tuple[int, ...]:
        return batch[self._nets[message.value.stage]].step.sizes

    def send(
        self,
        route: Route,
        lane: int,
        batch: NetBatches,
        microbatch: int,
        values: Sequence[Tensor],
    ) -> None:
        """Copy what an op made into a message, and send it.

        Args:
            route: what it is, and where it goes.
            lane: the lane that the op is in.
            batch: the batch of each net.
            microbatch: the microbatch; `WHOLE_BATCH` for a value that is one per step.
            values: the tensors.
        """
        step = batch[self._nets[route[1]]].step
        signature = self._signature(route, batch, microbatch)
        self._out[route, lane].send(step, microbatch, signature, values)

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
        while self.meanwhile() and not incoming.has_come(step, microbatch):
            time.sleep(_PAUSE_S)
        return incoming.receive(step, microbatch)

    def release(
        self, fact: Fact, stage: int, batch: NetBatches, microbatch: int
    ) -> None:
        """Release the buffer of a message that is no longer needed."""
        step = batch[self._nets[stage]].step
        incoming = self._incoming(fact, stage, step, microbatch)
        if stage_channels := self._from.get((fact, stage)):
            del stage_channels[step.place_of(microbatch)]
        incoming.release(step, microbatch)

    def _incoming(
        self, fact: Fact, stage: int, step: StepHeader, microbatch: int
    ) -> Incoming:
        channels = self._from.get((fact, stage))
        if channels is None:
            return self._only[fact, stage]
        return channels[step.place_of(microbatch)]

    def _signature(self, route: Route, batch: NetBatches, microbatch: int) -> Signature:
        """Return what the shapes of a message follow from."""
        nets = self._sized_by[route]
        if route[0] is Fact.GATHERED:
            return batch[nets[0]].step.num_samples
        if len(nets) == 1:
            return batch[nets[0]].step.sizes[microbatch]
        sizes = [batch[net].step.sizes for net in nets]
        return tuple(x[microbatch] if microbatch < len(x) else 0 for x in sizes)

    def _check(self, lanes: Device) -> None:
        lanes.check()
        self.meanwhile()

    def begin_step_end(self) -> None:
        """Receive what stands before an R or U: it may wait for other devices."""
        if self._transport.needs_order:
            self._transport.post_planned()

    def end_portion(self) -> None:
        """Receive what other devices send in this portion and a later one reads.

        Raises:
            WaitError: an earlier message took too long.
        """
        if self._transport.needs_order:
            self._transport.post_planned(rest=True)

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            WaitError: something did not leave within the timeout.
        """
        for outgoing in self._out.values():
            outgoing.flush(self._timeout_s)


def _place(message: Message, part: PortionPlan) -> Place:
    value = message.value
    microbatch = WHOLE_BATCH if value.microbatch is None else value.microbatch
    return value.step - part.shift, microbatch


def _nothing() -> bool:
    return False


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
