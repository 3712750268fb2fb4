"""A clock that waits until a device has finished its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeAlias

import torch

Clock: TypeAlias = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """Return a clock: seconds once all work queued on the device is done.

    An accelerator's clock waits for the current stream alone: another one may wait for
    a message that is sent only after this worker goes on.
    """
    if device.type == "cpu":
        return perf_counter

    def after_all_work() -> float:
        torch.accelerator.current_stream(device).synchronize()
        return perf_counter()

    return after_all_work


@contextmanager
def timed(clock: Clock, seconds: list[float]) -> Iterator[None]:
    """Append the block's seconds."""
    begin = clock()
    yield
    seconds.append(clock() - begin)
