"""Copies between a device and the host that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hocket.run.cluster.device_waits import record_event


class CopyEvent(Protocol):
    """An event in a stream of the device, as torch.Event."""

    def query(self) -> bool:
        """Return whether the stream has reached the event."""

    def synchronize(self) -> None:
        """Let the host wait for the event."""

    def wait(self) -> None:
        """Make the current stream wait for the event; the host does not wait."""


class Copies(Protocol):
    """Copies in the order of the current stream.

    Attributes:
        device: the device.
        pins: whether the host's memory must be pinned.
    """

    device: torch.device
    pins: bool

    def to_host(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> CopyEvent:
        """Copy tensors to the host; they have arrived after the event."""

    def to_device(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> CopyEvent:
        """Copy tensors to the device; sources may be overwritten after the event."""

    def record_event(self) -> CopyEvent:
        """Record an event after all work submitted to the current stream."""


class StreamCopies:
    """Copies in the current stream of an accelerator; see `Copies`.

    Args:
        device: the accelerator, with its index.
    """

    pins = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> CopyEvent:
        """See `Copies.to_host`."""
        for place, tensor in zip(into, tensors, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        return self.record_event()

    def to_device(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> CopyEvent:
        """See `Copies.to_device`."""
        return self.to_host(into, tensors)

    def record_event(self) -> CopyEvent:
        """See `Copies.record_event`."""
        return record_event(self.device)


def copies_of(device: torch.device) -> Copies | None:
    """Return the copies between a device and the host; None on a CPU."""
    return None if device.type == "cpu" else StreamCopies(device)
