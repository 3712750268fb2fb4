"""Copies of tensors on the host, so that training may go on during a write."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.run.checkpoint.collect import Tensors
from hocket.run.checkpoint.format.manifest import Section
from hocket.run.cluster.device_waits import record_event


class HostCopies:
    """Memory for copies, reused from save to save.

    Only one save may use it at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Section, str], Tensor] = {}

    def copy(self, tensors: Tensors) -> Tensors:
        """Copy tensors; the copies are complete when this returns."""
        kept, self._kept = self._kept, {}
        device: torch.device | None = None
        for section, named in tensors.items():
            for name, tensor in named.items():
                copy = _fitting(kept.pop((section, name), None), tensor)
                copy.copy_(tensor, non_blocking=True)
                self._kept[section, name] = copy
                device = tensor.device if tensor.is_cuda else device
        if device is not None:
            # Not all streams: others may wait for messages.
            record_event(device).synchronize()
        return {
            section: {name: self._kept[section, name] for name in named}
            for section, named in tensors.items()
        }


def _fitting(copy: Tensor | None, tensor: Tensor) -> Tensor:
    if copy is not None and (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype):
        return copy
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
