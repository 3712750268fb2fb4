"""Memory for received messages, used again and again.

A pool never shrinks by itself: it holds as many buffers per schema as were ever in use
at once.
The channels of a worker share one: outputs and their gradients often have one schema,
and the ones come when buffers of the others become free.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hocket.run.schema import ALIGNMENT_BYTES, Schema


@dataclass(frozen=True, slots=True)
class Buffer:
    """The memory of one message.

    Args:
        flat: shape `(buffer_bytes(schema),)`, uint8.
        views: the schema's tensors in it.
    """

    schema: Schema
    flat: Tensor
    views: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """The views as new tensors, which know of no gradient and no past use."""
        return tuple([view.detach() for view in self.views])


def buffer_bytes(schema: Schema) -> int:
    """The memory of one message; never 0: nobody can map or send nothing."""
    return max(schema.num_bytes, ALIGNMENT_BYTES)


class Pool:
    """Buffers by schema, on one device."""

    def __init__(self, device: torch.device) -> None:
        """Begin empty."""
        self._device = device
        self._free: defaultdict[Schema, list[Buffer]] = defaultdict(list)

    def take(self, schema: Schema) -> Buffer:
        """A buffer for one message: the last one given back, if there is one."""
        free = self._free[schema]
        return free.pop() if free else self._make(schema)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back.

        Autograd is told that its tensors have changed, because they soon will: whoever
        still needs them in a backward gets an error and not the next message's values.
        """
        if buffer.views:
            increment_version(buffer.views)
        self._free[buffer.schema].append(buffer)

    def trim(self) -> None:
        """Forget the buffers that are not in use."""
        self._free.clear()

    def _make(self, schema: Schema) -> Buffer:
        # Made during an evaluation, it must serve a later training step just as well.
        with torch.inference_mode(False):
            flat = torch.empty(
                buffer_bytes(schema), dtype=torch.uint8, device=self._device
            )
            return Buffer(schema, flat, schema.views(flat))
