"""The sending end of a shared-memory channel; transport.py has the picture."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hocket.errors import SchemaError, WaitError
from hocket.run.comm.buffers import Buffer, buffer_bytes
from hocket.run.comm.schema import Schema
from hocket.run.comm.schema_exchange import wait_for_value
from hocket.run.comm.shm.link import SocketLink, connect, own_process
from hocket.run.comm.shm.packets import (
    CreditPacket,
    ErrorPacket,
    MessagePacket,
    Packet,
    SchemaPacket,
    pack,
    unpack,
)
from hocket.run.comm.transport import Channel, Sender, check_tensors
from hocket.run.diagnostics.flight_recorder import OnWait

_FEW: Final = 4  # asking every time costs time, asking only at the last slot memory


class SharedMemorySender(Sender):
    """Copies messages into slots; see `Sender`.

    Args:
        channel: the channel that it sends on.
        store: where it finds the receiver's address, and writes its own process id.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
    """

    def __init__(
        self, channel: Channel, store: Store, *, timeout_s: float, on_wait: OnWait
    ) -> None:
        self._channel = channel
        self._store = store
        self._deadline = Deadline(channel, channel.to_rank, timeout_s, on_wait)
        self._link: SocketLink | None = None
        self._slots: Slots | None = None
        self._num_slots = 0
        self._ask_at = 0  # so many filled slots, it asks which are free again
        self._num_sent = 0
        self._free: list[int] = []  # the last one freed is used first: it is in caches
        self._filled: deque[int] = deque()  # in the order of sending and of taking
        self._announced: set[Schema] = set()
        self._last: Schema | None = None  # the last one sent
        store.set(process_key(channel), own_process())

    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """See `Sender.send`."""
        check_tensors(self._channel, tag, tensors, schema)
        link = self._link or self._connect(tag)
        if len(self._filled) >= self._ask_at and not self._has_room():
            fault = f"takes no more messages, and {len(self._filled)} wait for it"
            self._deadline.wait(link, self._has_room, tag, fault)
        if schema is not self._last and schema not in self._announced:
            self._send_schema(link, tag, schema)
        self._last = schema
        assert self._slots is not None, "announced"
        slot = self._free.pop()
        places = self._slots.buffer(slot, schema).views
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)
        self._filled.append(slot)
        self._num_sent += 1
        self._post(link, tag, MessagePacket(tag, slot))

    def flush(self, timeout_s: float) -> None:
        """See `Sender.flush`; there is no wait, for slots outlive this process."""
        if self._link is None:
            return
        self._count_credits(self._link)
        if self._filled and self._link.peer_gone:
            raise WaitError(
                f"{self._channel}: {self._deadline.peer_gone(self._link)} before it "
                f"took the last {len(self._filled)} of {self._num_sent} messages"
            )

    def close(self) -> None:
        """See `Sender.close`."""
        if self._link is not None:
            self._link.close()

    def _connect(self, tag: int) -> SocketLink:
        self._deadline.notify_wait()
        rank = self._channel.to_rank
        key, what = address_key(self._channel), f"the address of rank {rank}"
        address = wait_for_value(
            self._store, self._channel, key, what, self._deadline.timeout_s
        )
        num_slots, name = address.split()
        link = connect(name, self._deadline.timeout_s)
        if link is None:
            raise WaitError(
                f"{self._channel.message(tag)}: rank {rank} is gone: no process "
                "listens any more at the address that it gave"
            )
        self._num_slots = int(num_slots)
        self._ask_at = min(self._num_slots, _FEW)
        self._free = list(range(self._num_slots))
        self._link = link
        return link

    def _send_schema(self, link: SocketLink, tag: int, schema: Schema) -> None:
        """Announce a new schema, with larger slots if it needs them."""
        slot_bytes = buffer_bytes(schema)
        if self._slots is not None and slot_bytes <= self._slots.slot_bytes:
            self._post(link, tag, SchemaPacket(schema.digest, 0, str(schema)))
        else:
            memory = new_memory(self._num_slots, slot_bytes)
            packet = SchemaPacket(schema.digest, slot_bytes, str(schema))
            self._post(link, tag, packet, memory)
            self._slots = Slots(memory, self._num_slots, slot_bytes)
        self._announced.add(schema)

    def _post(
        self, link: SocketLink, tag: int, packet: Packet, memory: int | None = None
    ) -> None:
        """Post a packet, waiting while the kernel's queue is full.

        The receiver sends a credit after at most `num_uncredited` messages, which ends
        the wait.
        """
        data = pack(packet)
        if link.post(data, memory):
            return

        def posted() -> bool:
            self._count_credits(link)
            return link.post(data, memory)

        self._deadline.wait(link, posted, tag, "fetched no packets")

    def _has_room(self) -> bool:
        assert self._link is not None, "connected"
        self._count_credits(self._link)
        return bool(self._free) and not self._link.peer_gone

    def _count_credits(self, link: SocketLink) -> None:
        """Count the messages that the receiver took.

        Raises:
            SchemaError: the receiver expected other messages.
        """
        while link.has_packet() and (fetched := link.fetch()) is not None:
            match unpack(fetched[0]):
                case CreditPacket(count):
                    self._free.extend(self._filled.popleft() for _ in range(count))
                case ErrorPacket(text):
                    raise SchemaError(text)
                case MessagePacket() | SchemaPacket() as packet:
                    raise AssertionError(f"{packet} is for receivers")
                case packet:
                    assert_never(packet)


def address_key(channel: Channel) -> str:
    """Return the store key of a channel's receiver address."""
    return f"address/{channel.key}"


def process_key(channel: Channel) -> str:
    """Return the store key of a channel's sender: its `own_process`."""
    return f"process/{channel.key}"


# It is anonymous (a memfd): it counts as memory and not against /dev/shm, and it
# vanishes with the last process that maps it. The system gives it pages when they are
# first written, so slots that are never needed cost nothing.
class Slots:
    """One process's mapping of the shared slots.

    Args:
        descriptor: the memory's file descriptor; closed here, the mapping stays valid.
        num_slots: the number of slots.
        slot_bytes: the size of a slot; a multiple of 64.
    """

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int) -> None:
        try:
            memory = mmap.mmap(descriptor, num_slots * slot_bytes)
        finally:
            os.close(descriptor)
        self.slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._memory = memory
        self._buffers: dict[Schema, list[Buffer]] = {}
        self._last: tuple[Schema | None, list[Buffer]] = None, []

    def buffer(self, slot: int, schema: Schema) -> Buffer:
        """Return a slot as a message, of at most `slot_bytes`."""
        last, buffers = self._last
        if schema is not last:  # most follow one of their own kind
            if schema not in self._buffers:
                self._buffers[schema] = self._make(schema)
            buffers = self._buffers[schema]
            self._last = schema, buffers
        return buffers[slot]

    def _make(self, schema: Schema) -> list[Buffer]:
        size = buffer_bytes(schema)
        with torch.inference_mode(False):  # see Pool: they outlive an evaluation
            flats = [
                torch.frombuffer(
                    self._memory,
                    dtype=torch.uint8,
                    count=size,
                    offset=i * self.slot_bytes,
                )
                for i in range(self._num_slots)
            ]
            return [Buffer.of(schema, flat) for flat in flats]


def new_memory(num_slots: int, slot_bytes: int) -> int:
    """Make shared memory and return its descriptor, for `Slots` in both processes."""
    descriptor = os.memfd_create("hocket", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_slots * slot_bytes)
    return descriptor


@dataclass(frozen=True, slots=True)
class Deadline:
    """Waits for a peer until a deadline, with errors that name it.

    Args:
        channel: the channel that is waited on.
        other: the rank that is waited for.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
    """

    channel: Channel
    other: int
    timeout_s: float
    on_wait: OnWait

    def wait(
        self, link: SocketLink, done: Callable[[], bool], tag: int, fault: str
    ) -> None:
        """Wait for the other end.

        Args:
            link: the connection to the other end.
            done: fetches packets and returns whether the wait is over.
            tag: the tag of the message that is waited for.
            fault: the other rank's failure, beginning with a verb, for errors.

        Raises:
            WaitError: the time is up, or the other end is gone.
        """
        if done():
            return
        self.notify_wait()
        begin_s = time.monotonic()
        while not done():
            waited_s = time.monotonic() - begin_s
            if link.peer_gone:
                raise WaitError(
                    f"{self.channel.message(tag)}: {self.peer_gone(link)} and {fault}"
                )
            if waited_s >= self.timeout_s:
                raise WaitError(
                    f"{self.channel.message(tag)}: waited {waited_s:.1f} s; rank "
                    f"{self.other} (process {link.pid}) lives but {fault}: it is "
                    "stopped, stuck, or slower than the timeout allows"
                )
            link.wait(self.timeout_s - waited_s)

    def notify_wait(self) -> None:
        """Call `on_wait`."""
        self.on_wait(self.channel.name, self.other)

    def peer_gone(self, link: SocketLink) -> str:
        """Describe that the other end is gone."""
        return (
            f"rank {self.other} is gone (its process {link.pid} ended, or closed the "
            "channel)"
        )
