"""Copies between a device and the host that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the work of a device's stream (as torch.Event)."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def wait(self) -> None:
        """Let the current stream wait for it, and not the host."""


class Copies(Protocol):
    """Copies in the order of the current stream.

    Attributes:
        device: the device.
        pins: whether the host's memory must be pinned.
    """

    device: torch.device
    pins: bool

    def to_host(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> Mark:
        """Copy tensors of the device; they are there when the mark is passed."""

    def to_device(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> Mark:
        """Copy tensors of the host; their memory is free when the mark is passed."""

    def mark(self) -> Mark:
        """Mark the end of what the current stream was given so far."""


class StreamCopies:
    """See `Copies`; of an accelerator.

    Args:
        device: the accelerator, with its index.
    """

    pins = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> Mark:
        """See `Copies.to_host`."""
        for place, tensor in zip(into, tensors, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        return self.mark()

    def to_device(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> Mark:
        """See `Copies.to_device`."""
        return self.to_host(into, tensors)

    def mark(self) -> Mark:
        """See `Copies.mark`."""
        event = torch.Event(self.device)
        event.record()
        return event
