"""Messages of the host's tensors through torch.distributed, by gloo.

    send: pack into a buffer, isend ═══════▶ irecv, posted num_buffers messages early,
    the buffer is kept until it has left     into buffers of a pool

gloo pairs messages by number (wire.py). One that is not expected waits for ever: so
both ends must have agreed on the schema (schema_exchange.py). NCCL has a transport of
its own (ordered.py).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hocket.errors import RunError
from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.schema_exchange import wait_for_value
from hocket.run.comm.schema import Schema
from hocket.run.comm.dist.wire import (
    MAX_CHANNELS,
    BackgroundWait,
    Wire,
    wire_number,
)
from hocket.run.diagnostics.flight_recorder import OnWait
from hocket.run.comm.transport import (
    NUM_BUFFERS,
    Channel,
    Receiver,
    Sender,
    Transport,
    check_tensors,
    ignore_wait,
)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A message that was handed to the backend."""

    tag: int
    buffer: Buffer
    work: dist.Work


class TorchSender(Sender):
    """Packs messages and hands them to the backend; see `Sender`."""

    def __init__(
        self, number: int, wire: Wire, pool: Pool, *, num_buffers: int
    ) -> None:
        self._number = number
        self._wire = wire
        self._pool = pool
        self._num_buffers = num_buffers
        self._num_sent = 0
        self._in_flight: deque[_InFlight] = deque()

    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """See `Sender.send`."""
        check_tensors(self._wire.channel, tag, tensors, schema)
        while len(self._in_flight) >= self._num_buffers:
            self._finish_oldest(self._wire.timeout_s)
        buffer = self._pool.take(schema)
        for place, tensor in zip(buffer.views, tensors, strict=True):
            place.copy_(tensor.detach())
        number = wire_number(self._number, self._num_sent, tag)
        work = self._wire.start(dist.isend, buffer.flat, number, tag)
        self._num_sent += 1
        self._in_flight.append(_InFlight(tag, buffer, work))

    def flush(self, timeout_s: float) -> None:
        """See `Sender.flush`."""
        until_s = time.monotonic() + timeout_s
        while self._in_flight:
            self._finish_oldest(max(0.001, until_s - time.monotonic()))

    def close(self) -> None:
        """See `Sender.close`."""
        self._in_flight.clear()

    def _finish_oldest(self, timeout_s: float) -> None:
        oldest = self._in_flight[0]
        self._wire.wait(oldest.work, oldest.tag, timeout_s)
        self._in_flight.popleft()
        self._pool.release(oldest.buffer)


class TorchReceiver(Receiver):
    """Posts receives before their messages are sent; see `Receiver`."""

    def __init__(
        self, store: Store, wire: Wire, pool: Pool, *, num_buffers: int
    ) -> None:
        self._store = store
        self._wire = wire
        self._pool = pool
        self._num_buffers = num_buffers
        self._number: int | None = None  # the sender's end has it, once that is made
        self._num_posted = 0
        self._expected: deque[tuple[int, Schema]] = deque()
        self._posted: dict[int, _InFlight] = {}
        self._awaited: dict[int, BackgroundWait] = {}  # that `poll` began
        self._held: dict[int, Buffer] = {}

    def expect(self, tags: Sequence[int], schema: Schema) -> None:
        """See `Receiver.expect`."""
        self._expected.extend((tag, schema) for tag in tags)
        self._pool.expect(schema, len(tags))
        self._post_early()

    def ready(self, tag: int) -> bool:
        """See `Receiver.ready`; gloo knows only once it is waited for."""
        posted = self._posted.get(tag)
        return posted is not None and posted.work.is_completed()

    def poll(self, tag: int) -> bool:
        """See `Receiver.poll`; a thread waits, as gloo knows only what is waited for."""
        if tag not in self._awaited:
            work = self._posted_for(tag).work
            self._awaited[tag] = BackgroundWait(self._wire, work, tag)
        return self._awaited[tag].is_over

    def receive(self, tag: int) -> tuple[Tensor, ...]:
        """See `Receiver.receive`."""
        posted = self._posted_for(tag)
        if (wait := self._awaited.pop(tag, None)) is not None:
            wait.end()
        else:
            self._wire.wait(posted.work, tag, self._wire.timeout_s)
        del self._posted[tag]
        self._post_early()
        self._held[tag] = posted.buffer
        return posted.buffer.tensors()

    def release(self, tag: int) -> None:
        """See `Receiver.release`."""
        self._pool.release(self._held.pop(tag))

    def close(self) -> None:
        """See `Receiver.close`."""
        self._expected.clear()
        self._posted.clear()

    def _posted_for(self, tag: int) -> _InFlight:
        while tag not in self._posted:
            channel = self._wire.channel
            assert self._expected, f"{channel.message(tag)} was never expected"
            self._post_next()
        return self._posted[tag]

    def _post_early(self) -> None:
        while self._expected and len(self._posted) < self._num_buffers:
            self._post_next()

    def _post_next(self) -> None:
        tag, schema = self._expected.popleft()
        if self._number is None:
            self._number = self._next_number()
        buffer = self._pool.take(schema)
        number = wire_number(self._number, self._num_posted, tag)
        work = self._wire.start(dist.irecv, buffer.flat, number, tag)
        self._num_posted += 1
        self._posted[tag] = _InFlight(tag, buffer, work)

    def _next_number(self) -> int:
        wire = self._wire
        what = f"rank {wire.peer} to make its end of the channel"
        key = _number_key(wire.channel)
        return int(
            wait_for_value(self._store, wire.channel, key, what, wire.timeout_s)
        )


class TorchTransport(Transport):
    """Carries messages over the job's process group.

    Args:
        store: assigns numbers to channels; with a prefix of its own for every
            transport.
        timeout_s: how long a wait may take.
        num_buffers: how many messages of a channel may be in flight on each side.
        on_wait: called before each wait.
        group: a gloo group that only this transport uses and closes; None for the
            job's.
    """

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float,
        num_buffers: int = NUM_BUFFERS,
        on_wait: OnWait = ignore_wait,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._store = store
        self._group = group
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        self._own_groups: list[dist.ProcessGroup] = [] if group is None else [group]
        self._num_buffers = num_buffers
        self._ends: list[Sender | Receiver] = []
        self._sent: list[Pool] = []  # by sender: threads of their own may use them
        self._received = Pool(torch.device("cpu"))

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        number = self._store.add("num channels", 1) - 1
        if number >= MAX_CHANNELS:
            raise RunError(
                f"{channel}: a job can have {MAX_CHANNELS} channels, no more"
            )
        self._store.set(_number_key(channel), str(number))
        wire = self._wire(channel, channel.to_rank)
        pool = Pool(torch.device("cpu"))
        self._sent.append(pool)
        sender = TorchSender(number, wire, pool, num_buffers=self._num_buffers)
        self._ends.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        wire = self._wire(channel, channel.from_rank)
        receiver = TorchReceiver(
            self._store, wire, self._received, num_buffers=self._num_buffers
        )
        self._ends.append(receiver)
        return receiver

    def trim(self) -> None:
        """See `Transport.trim`."""
        for pool in (*self._sent, self._received):
            pool.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        for end in self._ends:
            end.close()
        while self._own_groups:
            with contextlib.suppress(ValueError):  # a process that left the job has left it, too
                dist.destroy_process_group(self._own_groups.pop())

    def _wire(self, channel: Channel, peer: int) -> Wire:
        return Wire(self._group, self._timeout_s, self._on_wait, channel, peer)


def _number_key(channel: Channel) -> str:
    return f"channel/{channel.key}"
