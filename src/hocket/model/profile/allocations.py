"""How many bytes of tensors are alive, as the allocator itself counts them.

    with allocations(device) as log:
        with log.span():            the most at once in here, beyond what was there when
            ...                     it began, is in `log.peaks`, and what it left behind
                                    in `log.left`: one number each per span

On a CPU torch's profiler is told of every block that the allocator gives out or takes
back, also of those that an operator only uses while it runs. It does not know how large
a block is that was given out before it first ran: what a log takes back, it should have
given out. A GPU's allocator counts by itself.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, Final

import torch
from torch.autograd import (
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)
from torch.autograd.profiler import record_function

_BEGIN: Final = "hocket: a span begins"
_END: Final = "hocket: a span ends"


class AllocationLog(ABC):
    """Spans of a run, and the bytes of each, in their order.

    Attributes:
        peaks: the most at once in a span, beyond what was there when it began.
        left: how much more there was at its end, or less, below 0. Both are complete
            when the log ends.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.left: list[int] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """What happens inside is one span; spans do not overlap.

        Python collects no garbage meanwhile: what others left would seem given back.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            with self._counted():
                yield
        finally:
            if collects:
                gc.enable()

    @abstractmethod
    def _counted(self) -> AbstractContextManager[None]:
        """The span itself."""


@contextmanager
def allocations(device: torch.device) -> Iterator[AllocationLog]:
    """Watch the allocator of one device; on a CPU, what this thread asks it for."""
    if device.type == "cuda":
        yield _CudaLog(device)
        return
    log = _CpuLog()
    # The other profiler writes a line to stderr whenever it starts or stops.
    _enable_profiler_legacy(_config())
    try:
        yield log
    finally:
        records = _disable_profiler_legacy()
    log.read(records)


def _config() -> Any:
    return ProfilerConfig(
        ProfilerState.CPU,
        False,  # no shapes
        True,  # memory
        False,  # neither stacks nor FLOPs nor modules
        False,
        False,
        torch._C._profiler._ExperimentalConfig(),
    )


class _CudaLog(AllocationLog):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @contextmanager
    def _counted(self) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        self.peaks.append(torch.cuda.max_memory_allocated(self._device) - before)
        self.left.append(torch.cuda.memory_allocated(self._device) - before)


class _CpuLog(AllocationLog):
    @contextmanager
    def _counted(self) -> Iterator[None]:
        _mark(_BEGIN)
        yield
        _mark(_END)

    def read(self, threads: Sequence[Sequence[Any]]) -> None:
        """Add up the blocks of each span, as their records follow each other."""
        for records in threads:
            blocks: list[int] = []
            for record in records:
                match record.kind(), record.name():
                    case "memory_alloc", _:
                        blocks.append(record.cpu_memory_usage())
                    case "push", name if name == _BEGIN:
                        blocks.clear()
                    case "push", name if name == _END:
                        self.peaks.append(max(accumulate(blocks, initial=0)))
                        self.left.append(sum(blocks))


def _mark(name: str) -> None:
    with record_function(name):
        pass
