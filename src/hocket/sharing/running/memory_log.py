"""Counts what one job's thread allocates, as the allocator does, over an iteration.

torch's profiler records each block that a thread allocates or frees, with its time. It
knows the sizes only of blocks that were allocated while it ran: a log begins one whole
iteration before the one that is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd.profiler import record_function

from hocket.model.profile.allocations import profiler_config
from hocket.sharing.forecast import Forecast

_BEGIN: Final = "hocket: an iteration begins"
_BACKWARD: Final = "hocket: a backward begins"
_END: Final = "hocket: an iteration ends"


@dataclass(frozen=True, slots=True)
class Watched:
    """What a log has seen.

    Args:
        forecast: the last iteration.
        left_bytes: what was allocated since the log began, and not freed at its end.
        peak_bytes: the most of that at once.
    """

    forecast: Forecast
    left_bytes: int
    peak_bytes: int


class MemoryLog:
    """A log of the calling thread's allocations on a device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        # The other profiler writes a line to stderr whenever it starts or stops.
        _enable_profiler_legacy(profiler_config())

    def begin(self) -> None:
        """Mark the begin of an iteration."""
        _mark(_BEGIN)

    def backward(self) -> None:
        """Mark the begin of its backward."""
        _mark(_BACKWARD)

    def end(self) -> None:
        """Mark the end of the iteration."""
        _mark(_END)

    def discard(self) -> None:
        """End the log, and read nothing."""
        _disable_profiler_legacy()

    def close(self) -> Watched:
        """End the log; at least one whole iteration was marked."""
        held = peak = begin_bytes = 0
        began: Any = None
        middle_s = end_s = 0.0
        times: list[float] = []
        changes: list[float] = []
        for record in (x for own in _disable_profiler_legacy() for x in own):
            match record.kind(), record.name():
                case "memory_alloc", _:
                    change = self._bytes(record)
                    held, peak = held + change, max(peak, held + change)
                    if began is not None:
                        times.append(_seconds(began, record))
                        changes.append(change)
                case "push", name if name == _BEGIN:
                    began, begin_bytes, middle_s = record, held, 0.0
                    times, changes = [], []
                case "push", name if name == _BACKWARD and not middle_s:
                    middle_s = _seconds(began, record)
                case "push", name if name == _END:
                    end_s = _seconds(began, record)
        # Above what it leaves behind, such as gradients that the next one replaces.
        forecast = Forecast.of_changes(
            middle_s or end_s,
            end_s - (middle_s or end_s),
            [0.0, *times],
            [begin_bytes - held, *changes],
        )
        return Watched(forecast, held, peak)

    def _bytes(self, record: Any) -> int:
        usage = (
            record.cuda_memory_usage() if self._is_cuda else record.cpu_memory_usage()
        )
        return int(usage)


def _seconds(began: Any, record: Any) -> float:
    return float(began.cpu_elapsed_us(record)) / 1e6


def _mark(name: str) -> None:
    with record_function(name):
        pass
