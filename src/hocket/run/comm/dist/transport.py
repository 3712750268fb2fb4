"""Messages of the host's tensors through torch.distributed, by gloo.

    send: pack into a buffer, isend ═══════▶ irecv, posted num_buffers messages early,
    the buffer is kept until it has left     into buffers of a pool

All channels of a job share one gloo group, in which messages are paired by number. The
31 bits that gloo has for one are

    channel (10) | message on the channel (10) | tag mod 2039 (11)

which no two messages in flight share. The last part makes a disagreement about step,
microbatch or schema a wait that ends, not a wrong message. One that is not expected
waits for ever: so both ends must have agreed on the schema (schema_exchange.py). NCCL
has a transport of its own (ordered.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hocket.errors import RunError, WaitError
from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.schema import Schema
from hocket.run.comm.schema_exchange import wait_for_value
from hocket.run.comm.transport import (
    NUM_BUFFERS,
    Channel,
    Receiver,
    Sender,
    Transport,
    check_tensors,
    ignore_wait,
)
from hocket.run.diagnostics.flight_recorder import OnWait

_MAX_CHANNELS: Final = 1 << 10
_MAX_ON_THEIR_WAY: Final = 1 << 10
_CHECK: Final = 2039  # the largest prime below 2 ** 11


def wire_number(channel: int, message: int, tag: int) -> int:
    """Return the number under which gloo pairs a message.

    Args:
        channel: the channel's number, below 1024.
        message: how many messages the channel carried before.
        tag: the message's tag (`message_tag`).
    """
    order = channel * _MAX_ON_THEIR_WAY + message % _MAX_ON_THEIR_WAY
    return order << _CHECK.bit_length() | tag % _CHECK


@dataclass(frozen=True, slots=True)
class _Wire:
    """One end of a channel in a process group.

    Args:
        group: the group of both ends; None for the job's.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
        channel: the channel.
        peer: the rank at the other end.
    """

    group: dist.ProcessGroup | None
    timeout_s: float
    on_wait: OnWait
    channel: Channel
    peer: int

    def start(
        self,
        transfer: Callable[..., dist.Work | None],
        flat: Tensor,
        number: int,
        tag: int,
    ) -> dist.Work:
        """Start to send or receive a message.

        Args:
            transfer: `dist.isend` or `dist.irecv`.
            flat: the message's bytes.
            number: the number under which both ends pair it.
            tag: the message's tag.
        """
        try:
            work = transfer(flat, self.peer, group=self.group, tag=number)
        except RuntimeError as error:
            raise self._lost(tag, 0.0, error) from error
        assert work is not None, "this rank is a member of the group"
        return work

    def wait(self, work: dist.Work, tag: int, timeout_s: float) -> None:
        """Wait until a message has left or arrived.

        Args:
            work: the operation to wait for.
            tag: the message's tag.
            timeout_s: how long to wait.

        Raises:
            WaitError: the time is up, or the other end is gone.
        """
        self.on_wait(self.channel.name, self.peer)
        begin_s = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - begin_s
            raise self._lost(tag, waited_s, error) from error

    def _lost(self, tag: int, waited_s: float, error: RuntimeError) -> WaitError:
        """Translate an error of the backend."""
        message = self.channel.message(tag)
        reason = str(error).strip().split("\n", 1)[0]
        if "imed out" in reason:
            return WaitError(
                f"{message}: waited {waited_s:.1f} s for rank {self.peer}: it is "
                "stopped, stuck, slower than the timeout allows, or its messages are "
                f"others than those expected here ({reason})"
            )
        return WaitError(
            f"{message}: rank {self.peer} is gone after a wait of {waited_s:.1f} s "
            f"({reason})"
        )


class _BackgroundWait:
    """Waits for a message in a thread of its own, for a caller that must not block.

    A message of gloo can be waited for once: afterwards only `end` may be called.

    Args:
        wire: the end of the channel.
        work: the operation to wait for.
        tag: the message's tag.
    """

    def __init__(self, wire: _Wire, work: dist.Work, tag: int) -> None:
        self._error: WaitError | None = None
        self._thread = threading.Thread(
            target=self._wait, args=(wire, work, tag), daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the message has come, or will not."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Wait for the thread.

        Raises:
            WaitError: the time was up, or the other end is gone.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _wait(self, wire: _Wire, work: dist.Work, tag: int) -> None:
        try:
            wire.wait(work, tag, wire.timeout_s)
        except WaitError as error:
            self._error = error


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A message that was handed to the backend."""

    tag: int
    buffer: Buffer
    work: dist.Work


class TorchSender(Sender):
    """Packs messages and hands them to the backend; see `Sender`."""

    def __init__(
        self, number: int, wire: _Wire, pool: Pool, *, num_buffers: int
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
        self, store: Store, wire: _Wire, pool: Pool, *, num_buffers: int
    ) -> None:
        self._store = store
        self._wire = wire
        self._pool = pool
        self._num_buffers = num_buffers
        self._number: int | None = None  # the sender's end has it, once that is made
        self._num_posted = 0
        self._expected: deque[tuple[int, Schema]] = deque()
        self._posted: dict[int, _InFlight] = {}
        self._awaited: dict[int, _BackgroundWait] = {}  # that `poll` began
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
            self._awaited[tag] = _BackgroundWait(self._wire, work, tag)
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
        return int(wait_for_value(self._store, wire.channel, key, what, wire.timeout_s))


@dataclass(eq=False)
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

    store: Store
    _: KW_ONLY
    timeout_s: float
    num_buffers: int = NUM_BUFFERS
    on_wait: OnWait = ignore_wait
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Begin without channels."""
        self._own_groups = [] if self.group is None else [self.group]
        self._ends: list[Sender | Receiver] = []
        self._sent: list[Pool] = []  # by sender: threads of their own may use them
        self._received = Pool(torch.device("cpu"))

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        number = self.store.add("num channels", 1) - 1
        if number >= _MAX_CHANNELS:
            raise RunError(
                f"{channel}: a job can have {_MAX_CHANNELS} channels, no more"
            )
        self.store.set(_number_key(channel), str(number))
        wire = self._wire(channel, channel.to_rank)
        pool = Pool(torch.device("cpu"))
        self._sent.append(pool)
        sender = TorchSender(number, wire, pool, num_buffers=self.num_buffers)
        self._ends.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        wire = self._wire(channel, channel.from_rank)
        receiver = TorchReceiver(
            self.store, wire, self._received, num_buffers=self.num_buffers
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
            with contextlib.suppress(
                ValueError
            ):  # a process that left the job has left it, too
                dist.destroy_process_group(self._own_groups.pop())

    def _wire(self, channel: Channel, peer: int) -> _Wire:
        return _Wire(self.group, self.timeout_s, self.on_wait, channel, peer)


def _number_key(channel: Channel) -> str:
    return f"channel/{channel.key}"
