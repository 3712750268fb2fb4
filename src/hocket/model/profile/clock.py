"""A clock that tells when a device is done, and not when it was told what to do."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeAlias

import torch

Clock: TypeAlias = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """Seconds of this process, once all work handed to the device so far is done.

    An accelerator's clock waits for the current stream alone: on another one a message
    may be awaited that nobody sends before this worker goes on.
    """
    if device.type == "cpu":
        return perf_counter

    def after_all_work() -> float:
        torch.accelerator.current_stream(device).synchronize()
        return perf_counter()

    return after_all_work
