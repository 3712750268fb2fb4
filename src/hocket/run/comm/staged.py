"""Messages of a device's tensors by way of the host, as for two workers on one GPU.

    device    op makes it ─▶ copy ┐                            ┌ copy ─▶ op reads it
    host                          └▶ a thread waits for the    │ pinned memory
                                     copy, then sends ═══▶ receive waits

NCCL refuses two ranks on one GPU, and gloo carries no tensors of a GPU from one rank to
another. The inner transport lets a sender be `num_buffers` messages ahead; as many more
may wait for their copy or for the thread. The sender's lane continues at once. The
receiver's lane launches no op until the message has arrived, because the host cannot
signal a stream that waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hocket.errors import WaitError
from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.schema import Schema
from hocket.run.comm.step_header import HEADER
from hocket.run.comm.transport import (
    Carries,
    Channel,
    Receiver,
    Sender,
    Transport,
    check_tensors,
)
from hocket.run.device.copies import Copies, CopyEvent

_CLOSE_S: Final = 1.0  # for a thread that is sending; a peer may be gone


class StagedTransport(Transport):
    """Carries a device's tensors over a transport of the host's tensors.

    Args:
        inner: sends and receives tensors in host memory.
        copies: copies tensors between the device and the host.
        num_buffers: how many messages of a channel may wait to be copied or sent.
        timeout_s: how long a wait may take.
    """

    def __init__(
        self, inner: Transport, copies: Copies, *, num_buffers: int, timeout_s: float
    ) -> None:
        self._inner = inner
        self._copies = copies
        self._num_buffers = num_buffers
        self._timeout_s = timeout_s
        self._staging = _Staging(copies)
        self._pool = Pool(torch.device("cpu"), pins=copies.pins)
        self._senders: list[_StagedSender] = []

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        if channel.carries is Carries.HOST:
            return self._inner.sender(channel)
        sender = _StagedSender(
            channel,
            self._inner.sender(channel),
            self._copies,
            self._pool,
            num_buffers=self._num_buffers,
            timeout_s=self._timeout_s,
        )
        self._senders.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        if channel.carries is Carries.HOST:
            return self._inner.receiver(channel)
        return _StagedReceiver(self._inner.receiver(channel), self._staging)

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._inner.trim()
        self._staging.trim()
        self._pool.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        for sender in self._senders:
            sender.close()
        for sender in self._senders:
            sender.join(_CLOSE_S)
        self._inner.close()


_MAX_READ_EVENTS: Final = 64  # then passed ones are dropped: buffers may be gone


class _Staging:
    """The memory of a worker's staged receivers, on the host and on the device.

    Args:
        copies: copies tensors between the device and the host.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._host = Pool(torch.device("cpu"), pins=copies.pins)
        self._device = Pool(copies.device)
        self._copied: deque[tuple[CopyEvent, Buffer]] = deque()
        # By id(buffer): the ops that read it have ended.
        self._read_events: dict[int, CopyEvent] = {}

    def expect(self, schema: Schema, num_messages: int) -> None:
        """Announce how many messages of a schema come."""
        self._device.expect(schema, num_messages)

    def copy(self, tensors: Sequence[Tensor], schema: Schema) -> Buffer:
        """Copy a message to the device; the host does not wait for the copy."""
        self._release_copied()
        staged, buffer = self._host.take(schema), self._device.take(schema)
        for place, tensor in zip(staged.views, tensors, strict=True):
            place.copy_(tensor)
        if (read := self._read_events.pop(id(buffer), None)) is not None:
            read.wait()  # another lane's stream may still read it
        event = self._copies.to_device(buffer.views, staged.views)
        self._copied.append((event, staged))
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Return a buffer; it is overwritten after the ops submitted so far."""
        if len(self._read_events) >= _MAX_READ_EVENTS:
            left = self._read_events.items()
            self._read_events = {key: x for key, x in left if not x.query()}
        self._read_events[id(buffer)] = self._copies.record_event()
        self._device.release(buffer)

    def trim(self) -> None:
        """Release memory that holds no message now."""
        self._release_copied()
        self._host.trim()
        self._device.trim()
        self._read_events.clear()

    def _release_copied(self) -> None:
        while self._copied and self._copied[0][0].query():
            self._host.release(self._copied.popleft()[1])


class _StagedReceiver(Receiver):
    """Receives on the host and copies to the device; headers stay on the host.

    Args:
        inner: receives on the host.
        staging: the worker's memory.
    """

    def __init__(self, inner: Receiver, staging: _Staging) -> None:
        self._inner = inner
        self._staging = staging
        self._schemas: dict[int, Schema] = {}
        self._held: dict[int, Buffer] = {}

    def expect(self, tags: Sequence[int], schema: Schema) -> None:
        """See `Receiver.expect`."""
        self._inner.expect(tags, schema)
        if schema != HEADER:
            self._schemas |= dict.fromkeys(tags, schema)
            self._staging.expect(schema, len(tags))

    def ready(self, tag: int) -> bool:
        """See `Receiver.ready`."""
        return self._inner.ready(tag)

    def poll(self, tag: int) -> bool:
        """See `Receiver.poll`."""
        return self._inner.poll(tag)

    def receive(self, tag: int) -> tuple[Tensor, ...]:
        """See `Receiver.receive`. The host waits for the message."""
        tensors = self._inner.receive(tag)
        schema = self._schemas.pop(tag, None)
        if schema is None:
            return tensors
        buffer = self._held[tag] = self._staging.copy(tensors, schema)
        self._inner.release(tag)
        return buffer.tensors()

    def release(self, tag: int) -> None:
        """See `Receiver.release`."""
        buffer = self._held.pop(tag, None)
        if buffer is None:
            self._inner.release(tag)
        else:
            self._staging.release(buffer)

    def close(self) -> None:
        """See `Receiver.close`."""
        self._inner.close()


_log = logging.getLogger(__name__)

_PAUSE_S: Final = 50e-6  # between two looks at a copy
_LONGER_S: Final = 1.0  # added to the timeout: the inner sender's error says more


@dataclass(frozen=True, slots=True)
class _Pending:
    """A message whose copy to the host was started.

    Args:
        tag: its tag.
        buffer: its memory on the host.
        event: the copy has ended.
        until_s: by then the copy must have ended, on the monotonic clock.
    """

    tag: int
    buffer: Buffer
    event: CopyEvent
    until_s: float


@dataclass(eq=False)
class _StagedSender(Sender):
    """Copies messages to the host; a thread sends them when they are there.

    Args:
        channel: the channel that it sends on.
        inner: sends tensors in host memory; only the thread uses it while messages
            wait, and closes it.
        copies: copies tensors between the device and the host.
        pool: the worker's host memory.
        num_buffers: how many messages may wait to be copied or sent.
        timeout_s: how long a wait may take.
    """

    channel: Channel
    inner: Sender
    copies: Copies
    pool: Pool
    num_buffers: int
    timeout_s: float

    def __post_init__(self) -> None:
        """Begin without a thread: the first message starts it."""
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Pending] = deque()  # the first one may be being sent
        self._sent: list[Buffer] = []
        self._error: Exception | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """See `Sender.send`. An error of an earlier message is raised here."""
        check_tensors(self.channel, tag, tensors, schema)
        self._wait_until_left(self.num_buffers - 1, self.timeout_s + _LONGER_S)
        buffer = self.pool.take(schema)
        event = self.copies.to_host(buffer.views, tensors)
        until_s = time.monotonic() + self.timeout_s
        with self._changed:
            self._waiting.append(_Pending(tag, buffer, event, until_s))
            self._changed.notify_all()
        if self._thread is None:
            name = f"hocket sends {self.channel.name}"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()

    def flush(self, timeout_s: float) -> None:
        """See `Sender.flush`."""
        begin_s = time.monotonic()
        self._wait_until_left(0, timeout_s)
        self.inner.flush(max(0.001, timeout_s - (time.monotonic() - begin_s)))

    def close(self) -> None:
        """See `Sender.close`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            self.inner.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a closed sender."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _wait_until_left(self, most: int, timeout_s: float) -> None:
        """Wait until at most `most` messages are unsent; release buffers of sent ones.

        Raises:
            WaitError: they did not leave in time, or the receiver is gone.
            SchemaError: the receiver expected other messages.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: len(self._waiting) <= most or self._error is not None, timeout_s
            )
            sent, self._sent = self._sent, []
            if self._error is not None:
                raise self._error
        for buffer in sent:
            self.pool.release(buffer)
        if not in_time:
            raise WaitError(
                f"{self.channel}: {len(self._waiting)} messages did not leave within "
                f"{timeout_s:.1f} s: {self.copies.device} did not compute or copy "
                f"them, or rank {self.channel.to_rank} takes none"
            )

    def _serve(self) -> None:
        """Send the messages in their order, until the channel is closed or fails."""
        try:
            while (pending := self._next()) is not None:
                buffer = pending.buffer
                self.inner.send(pending.tag, buffer.views, buffer.schema)
                with self._changed:
                    self._sent.append(self._waiting.popleft().buffer)
                    self._changed.notify_all()
        except Exception as error:  # raised where the channel is used next
            _log.debug("%s: a message was not sent", self.channel, exc_info=True)
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed)  # close() ends it
            self.inner.close()

    def _next(self) -> _Pending | None:
        """Wait for the next message and its copy; None if the channel is closed."""
        with self._changed:
            # No timeout: the next message, or close(), ends it.
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            pending = self._waiting[0]
        while not pending.event.query():
            if self._is_closed:
                return None
            if time.monotonic() >= pending.until_s:
                raise WaitError(
                    f"{self.channel.message(pending.tag)}: {self.copies.device} did "
                    f"not compute and copy it within {self.timeout_s:.1f} s: an op is "
                    "stuck, or slower than the timeout allows"
                )
            time.sleep(_PAUSE_S)
        return pending
