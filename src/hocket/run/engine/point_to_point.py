"""The messages of one worker: which go where, in which order, under which tag.

Each flow between stages on different devices is two channels, one for outputs and one
for gradients:

    stage a ──F a>b──▶ stage b
            ◀─B b>a───

A channel's messages of one step come in the order in which the sender's lane makes
them, so the receiver can have buffers ready before they are sent. What a message holds
(shapes and types) is agreed once per shape signature, through the store, and is part of
every tag, together with the step, the microbatch and a digest of the batch. The first
message of a step is its header, by which workers with different batches find out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch.distributed as dist
from torch import Tensor

from hocket.core.op import BACKWARDS, Kind
from hocket.core.schedule import Lane, Schedule
from hocket.run.comm.schema import Schema, message_tag, schema_of
from hocket.run.comm.schema_exchange import Role, agree
from hocket.run.comm.step_header import HEADER, Step, compare
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport

Signature = int  # of a message's shapes: the number of samples in the microbatch

_HEADER: Final = -1  # in the place of a microbatch: what is sent before all of a step


@dataclass(slots=True)
class _Outgoing:
    """One way out.

    Args:
        channel: which.
        sender: its end here.
        schemas: that are agreed.
        headers: the steps whose header goes before their first message.
    """

    channel: Channel
    sender: Sender
    schemas: dict[Signature, Schema] = field(default_factory=dict)
    headers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Incoming:
    """One way in.

    Args:
        channel: which.
        receiver: its end here.
        order: the microbatches, as the sender's lane makes them.
        schemas: that are agreed.
        coming: what the receiver does not expect yet: of which step, and which
            microbatch; `_HEADER` for the step's header.
        tags: of what it does, by step and microbatch, until that is released.
        headers: the steps whose header is not read yet.
    """

    channel: Channel
    receiver: Receiver
    order: tuple[int, ...]
    schemas: dict[Signature, Schema] = field(default_factory=dict)
    coming: deque[tuple[Step, int]] = field(default_factory=deque)
    tags: dict[tuple[int, int], int] = field(default_factory=dict)
    headers: set[int] = field(default_factory=set)


class Mail:
    """Sends and receives what one device's lane hands to others.

    Args:
        schedule: one step's order, of all devices.
        device: this worker's.
        ranks: of each device in this replica.
        transport: what carries the messages.
        store: where schemas are agreed.
        prefix: of the keys in the store; differs between training and evaluation.
        timeout_s: after which a wait ends.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        ranks: Sequence[int],
        transport: Transport,
        store: dist.Store,
        *,
        prefix: str,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        # Equal ones are one object, so that whoever looks one up finds it at once.
        self._known: dict[Schema, Schema] = {}
        self._out: dict[tuple[Kind, int], _Outgoing] = {}
        self._in: dict[tuple[Kind, int], _Incoming] = {}
        program = schedule.program
        for source, target in program.flows:
            flows = [(Kind.FORWARD, source, target)]
            if program.stages[source].trainable and program.stages[target].trainable:
                flows.append((Kind.BACKWARD, target, source))
            for kind, a, b in flows:
                from_device = program.stages[a].device
                to_device = program.stages[b].device
                if from_device == to_device:
                    continue
                channel = Channel(
                    f"{prefix}{kind.value}{a}>{b}", ranks[from_device], ranks[to_device]
                )
                if from_device == device:
                    self._out[kind, a] = _Outgoing(channel, transport.sender(channel))
                elif to_device == device:
                    order = _order(schedule.lanes, from_device, a, kind)
                    receiver = transport.receiver(channel)
                    self._in[kind, b] = _Incoming(channel, receiver, order)

    def sends(self, kind: Kind, stage: int) -> bool:
        """Whether what an op of this kind makes on a stage goes to another device."""
        return (kind, stage) in self._out

    def receives(self, kind: Kind, stage: int) -> bool:
        """Whether a stage's inputs (F) or output gradients (B) come from elsewhere."""
        return (kind, stage) in self._in

    def begin(self, step: Step, *, overlaps: bool = False) -> None:
        """Have buffers ready for what this step brings, as far as shapes are agreed.

        A step may have fewer microbatches than the schedule (the last one in
        evaluation): those that it has come in the schedule's order.

        Args:
            step: of which messages will come.
            overlaps: whether messages of the step before are still to be sent.
        """
        for (kind, _), outgoing in self._out.items():
            if kind is Kind.FORWARD:
                outgoing.headers.add(step.number)
                if not overlaps:
                    _send_header(outgoing, step)
        for (kind, _), incoming in self._in.items():
            if kind is Kind.FORWARD:
                incoming.headers.add(step.number)
                incoming.coming.append((step, _HEADER))
            incoming.coming.extend(
                (step, microbatch)
                for microbatch in incoming.order
                if microbatch < len(step.sizes)
            )
            self._expect(incoming)

    def send(
        self,
        kind: Kind,
        stage: int,
        step: Step,
        microbatch: int,
        values: Sequence[Tensor],
    ) -> None:
        """Send what an op made; the values must not be changed afterwards."""
        outgoing = self._out[kind, stage]
        if step.number in outgoing.headers:
            _send_header(outgoing, step)
        size = step.sizes[microbatch]
        schema = outgoing.schemas.get(size)
        if schema is None:
            schema = schema_of(values)
            agree(
                self._store,
                outgoing.channel,
                str(size),
                schema,
                Role.SENDER,
                self._timeout_s,
            )
            schema = outgoing.schemas[size] = self._known.setdefault(schema, schema)
        outgoing.sender.send(_tag(schema, step, microbatch), values, schema)

    def receive(
        self, kind: Kind, stage: int, step: Step, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Wait for what an op of this stage needs; it stays valid until `release`.

        Raises:
            WaitError: it did not come within the timeout, or the sender is gone.
            SchemaError: something else came, or the two sides' batches differ.
        """
        incoming = self._in[kind, stage]
        if step.number in incoming.headers:
            self._read_header(incoming, step)
        if incoming.coming:
            self._expect_until(incoming, step, microbatch)
        return incoming.receiver.receive(incoming.tags[step.number, microbatch])

    def release(self, kind: Kind, stage: int, step: Step, microbatch: int) -> None:
        """Give back the buffer of a message that is no longer needed."""
        incoming = self._in[kind, stage]
        incoming.receiver.release(incoming.tags.pop((step.number, microbatch)))

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            WaitError: something did not leave within the timeout.
        """
        for outgoing in self._out.values():
            outgoing.sender.flush(self._timeout_s)

    def _read_header(self, incoming: _Incoming, step: Step) -> None:
        tag = _header_tag(step)
        (header,) = incoming.receiver.receive(tag)
        ends = incoming.channel
        compare(step.header(), ends.to_rank, header, ends.from_rank)
        incoming.receiver.release(tag)
        incoming.headers.remove(step.number)

    def _expect_until(self, incoming: _Incoming, step: Step, microbatch: int) -> None:
        """Learn the shapes of a message, and of those that are made before it."""
        while (step, microbatch) in incoming.coming:
            first, number = incoming.coming[0]
            size = first.sizes[number]
            schema = agree(
                self._store,
                incoming.channel,
                str(size),
                None,
                Role.RECEIVER,
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


def _send_header(outgoing: _Outgoing, step: Step) -> None:
    outgoing.sender.send(_header_tag(step), (step.header(),), HEADER)
    outgoing.headers.remove(step.number)


def _tag(schema: Schema, step: Step, microbatch: int) -> int:
    return message_tag(schema, step.number, step.first + microbatch, step.salt)


def _header_tag(step: Step) -> int:
    return message_tag(HEADER, step.number, step.first)


def _order(
    lanes: Sequence[Lane], device: int, stage: int, kind: Kind
) -> tuple[int, ...]:
    """In which order a stage's lane makes its outputs, or its input gradients."""
    kinds = BACKWARDS if kind is Kind.BACKWARD else {Kind.FORWARD}
    return tuple(
        op.microbatch
        for lane in lanes
        if lane.device == device
        for op in lane.ops
        if op.kind in kinds and op.stage == stage and op.microbatch is not None
    )
