"""A pool of memory for messages, by schema.

The channels of a worker share a pool: outputs and their gradients often have one
schema, and gradients arrive when buffers of outputs become free. If a step needs
many buffers of one schema and later others, what was free would stay beside what is in
use:

    looped-bfs, device 0     in use                   free, if all were kept
    2F0 .. 2F7               1 .. 8 of [8, 64, 16]
    2B7 .. 2B0               7 .. 0 of [8, 64, 16]    1 .. 8 of [8, 64, 16]
    0B7 .. 0B0               1 of [8, 32, 32]         8 of [8, 64, 16]  <- for nothing

So a buffer stays free only

- while more messages of its schema are to come in this step, or none at all;
- together with no more bytes than are in use, or few others, whichever is more.

All others go back to the allocator, for activations. Small ones always stay: to make
one takes longer than to fill it.

What a module, a loss or a hook has kept, such as a queue of a teacher's outputs, is
theirs: the next message does not write over it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hocket.run.comm.schema import ALIGNMENT_BYTES, Schema

NUM_KEPT: Final = 4  # free buffers that may stay: as many as a sender is usually ahead
SMALL_BYTES: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Buffer:
    """The memory of one message.

    Args:
        flat: the message's bytes: shape `(buffer_bytes(schema),)`, uint8.
        views: the schema's tensors in these bytes.
        num_owners: the tensors that share the memory while no user has one.
    """

    schema: Schema
    flat: Tensor
    views: tuple[Tensor, ...]
    num_owners: int

    @classmethod
    def of(cls, schema: Schema, flat: Tensor) -> Buffer:
        """Return a buffer in new memory."""
        views = schema.views(flat)
        return cls(schema, flat, views, _num_owners(flat))

    @property
    def is_kept(self) -> bool:
        """Whether a user has kept a tensor of it, or a view of one."""
        return _num_owners(self.flat) != self.num_owners

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the views as new tensors, without gradients or version history."""
        return tuple([view.detach() for view in self.views])


def buffer_bytes(schema: Schema) -> int:
    """Return the size of one message; never 0, since empty memory cannot be mapped."""
    return max(schema.num_bytes, ALIGNMENT_BYTES)


@dataclass(slots=True)
class _SchemaPool:
    """The buffers of one schema.

    Args:
        num_bytes: the size of one buffer; 0 for small ones, which are not counted.
        free: free buffers with the number of their return; the last one returned is on
            the right.
        num_due: messages that were announced and have not come yet.
    """

    num_bytes: int
    free: deque[tuple[int, Buffer]] = field(default_factory=deque)
    num_due: int = 0


class Pool:
    """Buffers by schema, on one device.

    Args:
        device: the device.
        pins: whether the buffers are in pinned memory of the host, which devices copy
            without the host.
    """

    def __init__(self, device: torch.device, *, pins: bool = False) -> None:
        self._device = device
        self._pins = pins
        self._shelves: dict[Schema, _SchemaPool] = {}
        self._last: tuple[Schema, _SchemaPool] | None = None  # that was asked for
        self._returns = count()
        self._num_due = 0
        self._num_free = 0
        self._free_bytes = 0
        self._used_bytes = 0

    def expect(self, schema: Schema, num_messages: int) -> None:
        """Announce how many buffers of a schema will be taken; optional."""
        shelf = self._schema_pool(schema)
        if shelf.num_bytes:
            shelf.num_due += num_messages
            self._num_due += num_messages

    def take(self, schema: Schema) -> Buffer:
        """Return a buffer for one message: the last one released, if there is one."""
        shelf = self._schema_pool(schema)
        num_bytes = shelf.num_bytes
        self._used_bytes += num_bytes
        buffer = self._take_unkept(shelf) or self._make(schema)
        if shelf.num_due:
            shelf.num_due -= 1
            self._num_due -= 1
            if self._is_over(shelf):
                while shelf.free:
                    self._take_free(shelf)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the pool.

        Autograd's version counters are raised, since the buffer will be written again:
        a backward that still needs its tensors raises, and does not read the next
        message.
        """
        if buffer.views:
            increment_version(buffer.views)
        shelf = self._schema_pool(buffer.schema)
        self._used_bytes -= shelf.num_bytes
        if self._is_over(shelf):
            return
        shelf.free.append((next(self._returns), buffer))
        if shelf.num_bytes:
            self._num_free += 1
            self._free_bytes += shelf.num_bytes
            while self._num_free > NUM_KEPT and self._free_bytes > self._used_bytes:
                self._forget_oldest()

    def trim(self) -> None:
        """Release the buffers that are not in use."""
        for shelf in self._shelves.values():
            shelf.free.clear()
        self._num_free = self._free_bytes = 0

    def _schema_pool(self, schema: Schema) -> _SchemaPool:
        if self._last is not None and self._last[0] is schema:
            return self._last[1]
        shelf = self._shelves.get(schema)
        if shelf is None:
            num_bytes = buffer_bytes(schema)
            shelf = _SchemaPool(num_bytes if num_bytes >= SMALL_BYTES else 0)
            self._shelves[schema] = shelf
        self._last = schema, shelf
        return shelf

    def _is_over(self, shelf: _SchemaPool) -> bool:
        """Return whether other messages are still to come, but none of this schema."""
        return bool(shelf.num_bytes and self._num_due and not shelf.num_due)

    def _take_unkept(self, shelf: _SchemaPool) -> Buffer | None:
        """Return a free buffer; forget those that a module or a loss has kept."""
        while shelf.free:
            buffer = self._take_free(shelf)
            if not buffer.is_kept:
                return buffer
        return None

    def _take_free(self, shelf: _SchemaPool) -> Buffer:
        if shelf.num_bytes:
            self._num_free -= 1
            self._free_bytes -= shelf.num_bytes
        return shelf.free.pop()[1]

    def _forget_oldest(self) -> None:
        shelves = self._shelves.values()
        counted = (shelf for shelf in shelves if shelf.num_bytes and shelf.free)
        oldest = min(counted, key=lambda shelf: shelf.free[0][0])
        oldest.free.popleft()
        self._num_free -= 1
        self._free_bytes -= oldest.num_bytes

    def _make(self, schema: Schema) -> Buffer:
        # Made during an evaluation, it must serve a later training step just as well.
        with torch.inference_mode(False):
            flat = torch.empty(
                buffer_bytes(schema),
                dtype=torch.uint8,
                device=self._device,
                pin_memory=self._pins,
            )
            return Buffer.of(schema, flat)


def _num_owners(x: Tensor) -> int:
    """Return how many tensors share the memory of one."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)
