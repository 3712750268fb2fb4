"""Counts the bytes of live tensors, as the allocator itself does.

    with allocations(device) as log:
        with log.span():            the most at once in here, beyond what was there when
            ...                     it began, is in `log.peaks`, and what it left behind
                                    in `log.left`: one number each per span

On a CPU torch's profiler records every block that the allocator allocates or frees,
also the workspaces of operators. It does not know the size of a block that was
allocated before it first ran: what is freed within a log should be allocated within it.
A GPU's allocator counts by itself.
"""

from __future__ import annotations

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

from hocket import cuda
from hocket.garbage import no_collections

_BEGIN: Final = "hocket: a span begins"
_END: Final = "hocket: a span ends"


class AllocationLog(ABC):
    """The bytes of each span of a run, in order.

    Attributes:
        peaks: the most allocated at once in a span, beyond the bytes at its begin.
        left: how many more bytes there were at its end; negative if fewer. Both are
            complete when the log ends.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.left: list[int] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure the block as one span; spans do not overlap.

        Python collects no garbage meanwhile: earlier garbage would count as freed.
        """
        with no_collections(), self._counted():
            yield

    @abstractmethod
    def _counted(self) -> AbstractContextManager[None]:
        """Measure the span itself."""


@contextmanager
def allocations(device: torch.device) -> Iterator[AllocationLog]:
    """Watch the allocator of one device; on a CPU, for this thread only."""
    if device.type == "cuda":
        yield _CudaLog(device)
        return
    log = _CpuLog()
    # The other profiler writes a line to stderr whenever it starts or stops.
    _enable_profiler_legacy(profiler_config())
    try:
        yield log
    finally:
        records = _disable_profiler_legacy()
    log.read(records)


def profiler_config() -> Any:
    """Return the settings of a profiler of memory alone."""
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
        cuda.reset_peak(self._device)
        before = cuda.allocated_bytes(self._device)
        yield
        self.peaks.append(cuda.peak_bytes(self._device) - before)
        self.left.append(cuda.allocated_bytes(self._device) - before)


class _CpuLog(AllocationLog):
    @contextmanager
    def _counted(self) -> Iterator[None]:
        _mark(_BEGIN)
        yield
        _mark(_END)

    def read(self, threads: Sequence[Sequence[Any]]) -> None:
        """Add up the blocks of each span, in the order of their records."""
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
