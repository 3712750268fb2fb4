"""Memory that two processes share: slots of equal size, one message in each.

It is anonymous (a memfd): it counts as memory and not against /dev/shm, and it vanishes
with the last process that maps it. The system gives it pages when they are first
written, so slots that are never needed cost nothing.
"""

from __future__ import annotations

import mmap
import os

import torch

from hocket.run.comm.buffers import Buffer, buffer_bytes
from hocket.run.comm.schema import Schema


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
            return [Buffer(schema, flat, schema.views(flat)) for flat in flats]


def new_memory(num_slots: int, slot_bytes: int) -> int:
    """Make shared memory and return its descriptor, for `Slots` in both processes."""
    descriptor = os.memfd_create("hocket", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_slots * slot_bytes)
    return descriptor
