"""Counts what one job's thread allocates over an iteration, with the time of each.

torch's profiler records each block that the allocator gives to a thread or takes back.
It knows the sizes only of blocks that were allocated while it ran: a log begins one
whole iteration before the one that is read.

CUDA's own allocator (cudaMallocAsync) reports nothing to the profiler. There each
operator's storages are counted, from where they are first made or read until they are
freed; workspaces are not seen.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from hocket import cuda
from hocket.model.profile.allocations import profiler_config
from hocket.model.trace.observe import storage_of
from hocket.run.device.operator_mode import OperatorMode
from hocket.sharing.forecast import Forecast

_BEGIN: Final = "hocket: an iteration begins"
_BACKWARD: Final = "hocket: a backward begins"
_END: Final = "hocket: an iteration ends"
_BLOCK: Final = 512  # bytes; an allocator of a GPU gives multiples of it
Event: TypeAlias = tuple[float, str | int]  # seconds; a mark, or a change of the bytes


@dataclass(frozen=True, slots=True)
class Watched:
    """What a log has seen since it was last read.

    Args:
        forecast: the last iteration.
        left_bytes: what was allocated, and is still held.
        grown_bytes: by how much more was held at the end of the last iteration than at
            that of the one before.
        end_bytes: what was held at the end of the last iteration.
    """

    forecast: Forecast
    left_bytes: int
    grown_bytes: int
    end_bytes: int


class MemoryLog(ABC):
    """A log of the calling thread's allocations on a device."""

    _begin_bytes: int | None = None  # above what was held at the end before; None: ?

    def begin(self) -> None:
        """Mark the beginning of an iteration."""
        self._mark(_BEGIN)

    def backward(self) -> None:
        """Mark the beginning of its backward."""
        self._mark(_BACKWARD)

    def end(self) -> None:
        """Mark the end of the iteration."""
        self._mark(_END)

    def read(self) -> Watched:
        """Read what was seen since the last time: at least one whole iteration.

        The log goes on.
        """
        seen = _watched(self._take(), self._begin_bytes)
        self._begin_bytes = seen.left_bytes - seen.end_bytes
        return seen

    @abstractmethod
    def _mark(self, name: str) -> None:
        """Mark a moment."""

    @abstractmethod
    def _take(self) -> Iterable[Event]:
        """Return what was seen since the last time, in order."""

    @abstractmethod
    def close(self) -> None:
        """End the log."""


def open_log(device: torch.device) -> MemoryLog:
    """Begin a log of the calling thread's allocations on a device."""
    is_cuda = device.type == "cuda"
    if is_cuda and cuda.allocator_backend() != cuda.NATIVE_ALLOCATOR:
        return StorageLog(device)
    return _ProfilerLog(is_cuda=is_cuda)


class _ProfilerLog(MemoryLog):
    """Asks torch's profiler."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._open()

    def _open(self) -> None:
        # The other profiler writes a line to stderr whenever it starts or stops.
        _enable_profiler_legacy(profiler_config())

    def _mark(self, name: str) -> None:
        with record_function(name):
            pass

    def close(self) -> None:
        """See `MemoryLog.close`."""
        _disable_profiler_legacy()

    def _take(self) -> Iterator[Event]:
        records: list[Any] = [x for own in _disable_profiler_legacy() for x in own]
        self._open()
        return (
            (records[0].cpu_elapsed_us(x) / 1e6, self._event(x))
            for x in records
            if x.kind() in ("memory_alloc", "push")
        )

    def _event(self, record: Any) -> str | int:
        if record.kind() == "push":
            return str(record.name())
        usage = record.cuda_memory_usage if self._is_cuda else record.cpu_memory_usage
        return int(usage())


class StorageLog(MemoryLog, OperatorMode):
    """Counts the storages that operators make, and those from before that they read.

    Each operator of a watched iteration ends before the next one is launched, so that
    storages live as long as the device needs them, and not the host.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._events: list[Event] = []
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._entered = ExitStack()
        self._entered.enter_context(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator, and note what it makes or finds."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._device.type == "cuda":
            cuda.finish_stream(self._device)
        for tensor in self._tensors((args, kwargs, result)):
            key = storage_of(tensor)
            if key not in self._alive:
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // _BLOCK) * _BLOCK
                freed = partial(self._freed, key, size)
                self._alive[key] = weakref.ref(storage, freed)
                self._events.append((perf_counter(), size))
        return result

    def _tensors(self, values: Any) -> Iterator[Tensor]:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and x.device.type == self._device.type:
                yield x

    def _freed(self, key: int, size: int, _: object) -> None:
        if self._alive.pop(key, None) is not None:
            self._events.append((perf_counter(), -size))

    def _mark(self, name: str) -> None:
        self._events.append((perf_counter(), name))

    def close(self) -> None:
        """See `MemoryLog.close`."""
        self._entered.close()
        self._alive.clear()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _watched(events: Iterable[Event], begin_bytes: int | None) -> Watched:
    """Read the last iteration out of a log.

    Args:
        events: what it has seen.
        begin_bytes: what was held when they begin, above what was held at the end of
            the iteration before; None if that was not watched.
    """
    held = start_bytes = 0
    ends = [] if begin_bytes is None else [-begin_bytes]
    begin_s = middle_s = end_s = 0.0
    times: list[float] = []
    changes: list[int] = []
    for at_s, what in events:
        if isinstance(what, int):
            held += what
            times.append(at_s - begin_s)
            changes.append(what)
        elif what == _BEGIN:
            begin_s, start_bytes, middle_s = at_s, held, 0.0
            times, changes = [], []
        elif what == _BACKWARD and not middle_s:
            middle_s = at_s - begin_s
        elif what == _END:
            end_s = at_s - begin_s
            ends.append(held)
    # Above what it leaves behind, such as gradients that the next one replaces.
    forecast = Forecast.of_changes(
        middle_s or end_s,
        end_s - (middle_s or end_s),
        [0.0, *times],
        [start_bytes - held, *changes],
    )
    grown = ends[-1] - ends[-2] if len(ends) > 1 else 0
    return Watched(forecast, held, grown, ends[-1])
