"""The receiving end of a staged channel; transport.py has the picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.schema import Schema
from hocket.run.comm.step_header import HEADER
from hocket.run.comm.transport import Receiver
from hocket.run.device.copies import Copies, CopyEvent

_MAX_READ_EVENTS: Final = 64  # then passed ones are dropped: buffers may be gone


class Staging:
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


class StagedReceiver(Receiver):
    """Receives on the host and copies to the device; headers stay on the host.

    Args:
        inner: receives on the host.
        staging: the worker's memory.
    """

    def __init__(self, inner: Receiver, staging: Staging) -> None:
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
