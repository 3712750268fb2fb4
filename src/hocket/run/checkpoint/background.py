"""Writes one checkpoint while training goes on: a thread, and copies on the host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from hocket.errors import CheckpointError, HocketError, RunError
from hocket.run.checkpoint.collect import Tensors
from hocket.run.checkpoint.format.manifest import Section
from hocket.run.cluster.device_waits import record_event

_NICENESS: Final = 19  # training has the cores first


class BackgroundWriter:
    """Writes one checkpoint at a time; `wait` raises its errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: HocketError | None = None
        self._is_abandoned = threading.Event()

    def start(self, write: Callable[[], object]) -> None:
        """Start to write; the previous checkpoint must have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="hocket checkpoint", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is being written, without raising errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the checkpoint could not be written.
            RunError: another worker failed to take part.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self, grace_s: float) -> None:
        """Wait a little for the end; then stop writing and remove the files."""
        if self._thread is not None:
            self._thread.join(grace_s)
            self._is_abandoned.set()
            self._thread.join(grace_s)
            self._thread = self._error = None

    def wants_more(self) -> None:
        """Raise if the writing is to stop; the writer calls this now and then.

        Raises:
            CheckpointError: the writing was abandoned.
        """
        if self._is_abandoned.is_set():
            raise CheckpointError("the run ended while its checkpoint was written")

    def _run(self, write: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            write()
        except HocketError as error:
            self._error = error
        except Exception as error:
            self._error = RunError(f"writing a checkpoint: {error!r}")


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
