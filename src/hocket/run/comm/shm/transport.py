"""Messages between processes of one host, through memory that both map.

    sender                          shared slots                      receiver
    send: copy the tensors ──────▶ [ 2 │ 3 │ · │ 1 ] ──────▶ receive: copy to a buffer
          post "3 in slot 1" ═════════ link ═══════════════▶          of its own, and
          wait if no slot is    ◀═════ link ═══════════════           post "taken"
          free

Both copies together take a few microseconds for small messages, and run at a memcpy's
speed for big ones (bench/transport). Reading messages where they lie would save the
second: 20 µs for 512 KiB, nothing beside what a stage computes on them. For that, the
values of a tensor released too early would change without autograd's notice.

The first message of every schema is announced: with the schema's text, so that a
receiver that expects another can name both, and with larger slots if it needs them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final, assert_never

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hocket.errors import RunError, SchemaError, WaitError
from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.schema import Schema, tag_digest, tag_salt, tag_text
from hocket.run.comm.shm.link import Listener, SocketLink, has_ended, number_of
from hocket.run.comm.shm.packets import (
    CreditPacket,
    ErrorPacket,
    MessagePacket,
    SchemaPacket,
    pack,
    unpack,
)
from hocket.run.comm.shm.sender import (
    Deadline,
    SharedMemorySender,
    Slots,
    address_key,
    process_key,
)
from hocket.run.comm.transport import (
    NUM_BUFFERS,
    Channel,
    Receiver,
    Sender,
    Transport,
    ignore_wait,
)
from hocket.run.diagnostics.flight_recorder import OnWait


@dataclass(eq=False)
class SharedMemoryTransport(Transport):
    """Carries messages of CPU tensors between processes of one host and one user.

    Args:
        store: where receivers write their addresses; with a prefix of its own for every
            transport, since old addresses lead nowhere.
        timeout_s: how long a wait may take.
        num_buffers: how many messages the sender of a channel may be ahead; the
            receiver's number counts.
        num_uncredited: see `_SharedMemoryReceiver`; less than `num_buffers`.
        on_wait: called before each wait.
    """

    store: Store
    _: KW_ONLY
    timeout_s: float
    num_buffers: int = NUM_BUFFERS
    num_uncredited: int = 0
    on_wait: OnWait = ignore_wait

    def __post_init__(self) -> None:
        """Begin without channels."""
        self._ends: list[Sender | Receiver] = []
        self._pool = Pool(torch.device("cpu"))

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`; connects at the first message."""
        sender = SharedMemorySender(
            channel, self.store, timeout_s=self.timeout_s, on_wait=self.on_wait
        )
        self._ends.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`; starts to listen."""
        receiver = _SharedMemoryReceiver(
            channel,
            self.store,
            timeout_s=self.timeout_s,
            num_buffers=self.num_buffers,
            num_uncredited=self.num_uncredited,
            pool=self._pool,
            on_wait=self.on_wait,
        )
        self._ends.append(receiver)
        return receiver

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._pool.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        for end in self._ends:
            end.close()


def memory_domain() -> str:
    """Return a text that is equal in two processes if they can share memory.

    Raises:
        RunError: this system has no memory to share in the way that is needed.
    """
    if not hasattr(os, "memfd_create"):
        raise RunError("sharing memory between workers needs Linux; use gloo instead")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Socket names belong to a network namespace, process ids to a pid namespace.
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join([boot, *spaces, str(os.getuid())])


_LOOK_UP_S: Final = 0.2  # while no sender has connected
_LARGE_BYTES: Final = 1 << 16  # a slot to be used again before it leaves the caches


class _SharedMemoryReceiver(Receiver):
    """Copies messages out of slots; see `Receiver`.

    A message is in one of four places:

        expected ──▶ noticed (in its slot) ──▶ arrived (copied) ──▶ held ──▶ the pool
                 packet                  asked for, or        receive    release
                                         before one that is

    Args:
        channel: the channel that it receives.
        store: where it writes its address, and finds the sender's process id.
        timeout_s: how long a wait may take.
        num_buffers: the number of slots; this end chooses it.
        num_uncredited: how many messages it may have taken before it sends a credit;
            the sender may be that many fewer ahead. A credit costs two system calls,
            one at each end.
        pool: the worker's buffers, shared by its channels.
        on_wait: called before each wait.
    """

    def __init__(
        self,
        channel: Channel,
        store: Store,
        *,
        timeout_s: float,
        num_buffers: int,
        num_uncredited: int,
        pool: Pool,
        on_wait: OnWait,
    ) -> None:
        self._channel = channel
        self._store = store
        self._deadline = Deadline(channel, channel.from_rank, timeout_s, on_wait)
        self._listener = Listener()
        store.set(address_key(channel), f"{num_buffers} {self._listener.name}")
        self._link: SocketLink | None = None
        self._slots: Slots | None = None
        self._num_slots = num_buffers
        self._most_uncredited = num_uncredited
        self._num_uncredited = 0  # messages taken since the last credit
        self._texts: dict[int, str] = {}  # the text of each schema, by digest
        self._expected: deque[tuple[int, Schema]] = deque()
        self._noticed: deque[tuple[MessagePacket, Slots]] = deque()
        self._arrived: dict[int, Buffer] = {}
        self._held: dict[int, Buffer] = {}
        self._pool = pool

    def expect(self, tags: Sequence[int], schema: Schema) -> None:
        """See `Receiver.expect`."""
        for tag in tags:
            self._expected.append((tag, schema))
        self._pool.expect(schema, len(tags))

    def ready(self, tag: int) -> bool:
        """See `Receiver.ready`."""
        link = self._link or self._accept(0.0)
        while link is not None and (fetched := link.fetch()) is not None:
            self._read(*fetched)
        return tag in self._arrived or any(
            tag == message.tag for message, _ in self._noticed
        )

    def poll(self, tag: int) -> bool:
        """See `Receiver.poll`."""
        if self.ready(tag):
            return True
        return self._sender_has_ended() if self._link is None else self._link.peer_gone

    def receive(self, tag: int) -> tuple[Tensor, ...]:
        """See `Receiver.receive`."""
        buffer = self._arrived.pop(tag, None)
        if buffer is None:
            buffer = self._take_until(tag)
        self._held[tag] = buffer
        return buffer.tensors()

    def release(self, tag: int) -> None:
        """See `Receiver.release`."""
        self._pool.release(self._held.pop(tag))

    def close(self) -> None:
        """See `Receiver.close`."""
        self._listener.close()
        if self._link is not None:
            self._link.close()

    def _take_until(self, tag: int) -> Buffer:
        """Take messages in their order, up to the one asked for."""
        link = self._link or self._wait_for_sender(tag)
        while True:
            if not self._noticed and not self._next_message_packet():
                self._deadline.wait(
                    link, self._next_message_packet, tag, "did not send it"
                )
            came, buffer = self._take(link, tag)
            if came == tag:
                return buffer
            self._arrived[came] = buffer

    def _wait_for_sender(self, tag: int) -> SocketLink:
        """Wait for the sender to connect."""
        self._deadline.notify_wait()
        timeout_s, rank = self._deadline.timeout_s, self._channel.from_rank
        until_s = time.monotonic() + timeout_s
        while (remaining_s := until_s - time.monotonic()) > 0:
            ended = self._sender_has_ended()
            link = self._accept(0.0 if ended else min(remaining_s, _LOOK_UP_S))
            if link is not None:
                return link
            if ended:
                raise WaitError(
                    f"{self._channel.message(tag)}: rank {rank} is gone: its process "
                    "ended before it sent anything on this channel"
                )
        raise WaitError(
            f"{self._channel.message(tag)}: waited {timeout_s:.1f} s; rank {rank} sent "
            "nothing on this channel yet: it is stopped, stuck, or slower than the "
            "timeout allows"
        )

    def _sender_has_ended(self) -> bool:
        """Return whether the sender's process has started and ended."""
        process = self._sender_process()
        number = None if process is None else number_of(process)
        return number is not None and has_ended(number)

    def _is_sender(self, link: SocketLink) -> bool:
        """Return whether the sender has connected, as far as that can be seen."""
        process = self._sender_process()
        return process is not None and number_of(process) in (link.pid, None)

    def _sender_process(self) -> str | None:
        """Return the sender's `own_process`; None if it has not started."""
        key = process_key(self._channel)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _accept(self, timeout_s: float) -> SocketLink | None:
        self._link = self._listener.accept(timeout_s, self._is_sender)
        if self._link is not None:
            self._listener.close()
        return self._link

    def _next_message_packet(self) -> bool:
        """Fetch packets until one is about a message."""
        assert self._link is not None, "accepted"
        while not self._noticed and (fetched := self._link.fetch()) is not None:
            self._read(*fetched)
        return bool(self._noticed)

    def _read(self, data: bytes, memory: int | None) -> None:
        match unpack(data):
            case MessagePacket() as message:
                assert self._slots is not None, "announced"
                self._noticed.append((message, self._slots))
            case SchemaPacket(digest, slot_bytes, text):
                self._texts[digest] = text
                if memory is not None:
                    self._slots = Slots(memory, self._num_slots, slot_bytes)
            case CreditPacket() | ErrorPacket() as packet:
                raise AssertionError(f"{packet} is for senders")
            case packet:
                assert_never(packet)

    def _take(self, link: SocketLink, asked: int) -> tuple[int, Buffer]:
        """Copy the next message out of its slot, if it is the one expected."""
        assert self._expected, f"{self._channel.message(asked)} was never expected"
        tag, schema = self._expected.popleft()
        message, slots = self._noticed.popleft()
        if message.tag != tag:
            raise self._send_error(link, tag, schema, message.tag)
        buffer = self._pool.take(schema)
        buffer.flat.copy_(slots.buffer(message.slot, schema).flat)
        self._num_uncredited += 1
        # The queue is full only if the sender has left hundreds of credits unread.
        if self._must_credit_now(slots) and link.post(
            pack(CreditPacket(self._num_uncredited))
        ):
            self._num_uncredited = 0
        return tag, buffer

    def _must_credit_now(self, slots: Slots) -> bool:
        """Return whether to send a credit at once, and not with later messages.

        Always at once if nothing more is expected: both processes may end after that.
        """
        return (
            self._num_uncredited > self._most_uncredited
            or not self._expected
            or slots.slot_bytes > _LARGE_BYTES
        )

    def _send_error(
        self, link: SocketLink, tag: int, schema: Schema, came: int
    ) -> SchemaError:
        """Raise SchemaError on both sides, with what each expected and sent."""
        text = (
            f"{self._channel}: rank {self._channel.to_rank} expects {tag_text(tag)}, "
            f"{schema}; rank {self._channel.from_rank} sent {tag_text(came)}, "
            f"{self._texts.get(tag_digest(came), 'of a schema never announced')}"
        )
        if tag_salt(came) != tag_salt(tag):
            text += "; their batches differ: do both read the same data in one order?"
        link.post(pack(ErrorPacket(text)))
        return SchemaError(text)
