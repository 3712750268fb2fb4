"""A CUDA device: each lane is a stream, which the calling thread gives its work.

    host     0F0 0F1 0W0 ...   submits ahead; `synchronize` waits
    lane 0      │   0F0   │   0F1   │record e
    lane 1                          └─▶ wait e │   0W0   │

No lane is the default stream, which a capture refuses. No op may wait for the device
(`.item()`, `.tolist()`, `torch.tensor(..., device=)`): the lanes would run empty.

Autograd runs a backward on the stream of its forward, whatever stream is current: F, B
and I of a stage belong into one lane. Deferred weight gradients (W) may be in another.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import RunError, WaitError
from hocket.run.device.device import Device, DeviceLane, Event, IssueOrder, Work
from hocket.run.device.generators import generator_lock, seeded
from hocket.run.device.sanitize import Clock, Sanitizer

_POLL_S: Final = 20e-6  # between two queries; a blocking wait has no timeout


class CudaEvent(Event):
    """See `Event`. Made by `CudaDevice.new_event`."""

    def __init__(self) -> None:
        self.clock: Clock = ()  # the sanitizer's, when the event was recorded
        self._event = torch.cuda.Event()
        self._recorder = ""  # the op that recorded it

    def __str__(self) -> str:
        return f"the event that {self._recorder} records"

    def query(self) -> bool:
        """See `Event.query`. Do not call it while a graph is captured."""
        return bool(self._recorder) and self._event.query()

    def synchronize(self, timeout_s: float) -> None:
        """See `Event.synchronize`."""
        self._check_recorded("the caller")
        if not _poll(self._event.query, timeout_s):
            raise WaitError(
                f"waited {timeout_s:.1f} s for {self}: an op is stuck, or slower than "
                "the timeout allows"
            )

    def record(self, stream: torch.cuda.Stream, recorder: str) -> None:
        """Record it on a stream, as part of an op."""
        if self._recorder:
            raise RunError(
                f"{recorder}: {self} has been recorded before; make a new event for "
                "each recording"
            )
        self._event.record(stream)
        self._recorder = recorder

    def wait(self, stream: torch.cuda.Stream, waiter: str) -> None:
        """Let a stream wait for it."""
        self._check_recorded(waiter)
        stream.wait_event(self._event)

    def _check_recorded(self, waiter: str) -> None:
        """Refuse an event that was never recorded: CUDA would not wait for it."""
        if not self._recorder:
            raise RunError(
                f"{waiter} waits for an event that no op has recorded; submit the op "
                "which records it first (IssueOrder.TOPOLOGICAL)"
            )


class CudaLane(DeviceLane):
    """See `DeviceLane`. Made by `CudaDevice`.

    Args:
        device: the lane's device, with its index.
        number: position in `Device.lanes`.
        sanitizer: records events.
    """

    def __init__(
        self, device: torch.device, number: int, sanitizer: Sanitizer | None
    ) -> None:
        super().__init__(number, device)
        # Where both have a kernel to run, that of lane 0 goes first.
        self.stream: Final = torch.cuda.Stream(device, priority=-int(number == 0))
        self._sanitizer = sanitizer
        self._label = "none"  # of the last op that was submitted

    @property
    def where(self) -> str:
        """The lane and the last op that it was given, for errors."""
        return f"{self}, op {self._label}"

    def submit(
        self,
        work: Work,
        *,
        waits: Sequence[Event] = (),
        records: Sequence[Event] = (),
        label: str,
    ) -> None:
        """See `DeviceLane.submit`. It returns when the op's kernels are launched."""
        self._label = label
        try:
            with torch.cuda.stream(self.stream):
                for event in waits:
                    self.wait_event(event)
                work()
                for event in records:
                    self.record_event(event)
        except BaseException as error:
            error.add_note(f"in op {label}, {self}")
            raise

    def record_event(self, event: Event) -> None:
        """See `DeviceLane.record_event`."""
        own = _own(event)
        own.record(self.stream, f"op {self._label} in {self}")
        if self._sanitizer is not None:
            own.clock = self._sanitizer.record(self.number)

    def wait_event(self, event: Event) -> None:
        """See `DeviceLane.wait_event`. The stream waits, and the host goes on."""
        own = _own(event)
        own.wait(self.stream, f"op {self._label} in {self}")
        if self._sanitizer is not None:
            self._sanitizer.wait(self.number, own.clock)

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """See `DeviceLane.keep_alive`.

        `record_stream` delays the reuse of freed memory until this stream has come as
        far. To hold the tensors until their own lane waits for an event of this one
        would hold a W's activations until the step's update.
        """
        for tensor in tensors:
            tensor.record_stream(self.stream)


class CudaDevice(Device):
    """See `Device`.

    Args:
        device: the GPU, with its index.
        num_lanes: the number of streams.
        budget_bytes: how much memory tensors may take.
        timeout_s: how long a lane may wait for the generators.
        sanitizer: records events, to find races.
    """

    issue_order = IssueOrder.TOPOLOGICAL
    has_graphs = True

    def __init__(
        self,
        device: torch.device,
        num_lanes: int = 1,
        *,
        budget_bytes: int,
        timeout_s: float,
        sanitizer: Sanitizer | None = None,
    ) -> None:
        if device.type != "cuda" or device.index is None:
            raise RunError(f"{device} is no CUDA device with an index, as cuda:0 is")
        torch.cuda.init()
        # cudaMallocAsync says so of a tensor of the lane itself: so it is meant.
        warnings.filterwarnings("ignore", "Called record_stream on tensor whose")
        self._lanes = tuple(CudaLane(device, i, sanitizer) for i in range(num_lanes))
        super().__init__(device, self._lanes, budget_bytes, timeout_s, sanitizer)
        self._pool: Any = None  # of all graphs
        self._generators = (
            torch.cuda.default_generators[device.index],
            torch.default_generator,
        )
        self.fork()

    def new_event(self) -> CudaEvent:
        """See `Device.new_event`."""
        return CudaEvent()

    def fork(self) -> None:
        """See `Device.fork`. The caller issues on its current stream."""
        caller = torch.cuda.current_stream(self.torch_device)
        for lane in self._lanes:
            lane.stream.wait_stream(caller)
        if self.sanitizer is not None:
            self.sanitizer.fork()

    def join(self) -> None:
        """See `Device.join`. The caller issues on its current stream."""
        caller = torch.cuda.current_stream(self.torch_device)
        for lane in self._lanes:
            caller.wait_stream(lane.stream)
        if self.sanitizer is not None:
            self.sanitizer.join()

    def check(self) -> None:
        """See `Device.check`. Errors are raised where the host issues an op."""

    def synchronize(self, timeout_s: float) -> None:
        """See `Device.synchronize`.

        A kernel's own error has no op: CUDA reports it to a later call. Then
        `CUDA_LAUNCH_BLOCKING=1` shows where it happened.
        """
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes:
            if not _poll(lane.stream.query, deadline_s - time.monotonic()):
                raise WaitError(
                    f"waited {timeout_s:.1f} s; still at work: {lane.where} or an "
                    "earlier one; an op is stuck, or slower than the timeout allows"
                )
        if self.sanitizer is not None:
            self.sanitizer.synchronize()

    @contextmanager
    def fork_rng(self, lane: DeviceLane, seed: int) -> Iterator[None]:
        """See `Device.fork_rng`. The CPU's generator is seeded, too.

        Raises:
            RunError: a graph is being captured, which refuses a new seed.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RunError(
                f"{lane}: a captured graph takes no new seed; use fork_rng around each "
                "replay instead"
            )
        lock = generator_lock(self.torch_device)
        if not lock.acquire(self._timeout_s):
            raise WaitError(
                f"{lane}: waited {self._timeout_s:.1f} s for the default generator of "
                f"{self.torch_device}, which another thread holds"
            )
        try:
            with seeded(self._generators, seed):
                yield
        finally:
            lock.release()

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """See `Device.keep_alive`."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self.torch_device))

    def allocated_bytes(self) -> int:
        """See `Device.allocated_bytes`."""
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        """See `Device.peak_bytes`."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """See `Device.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def capture_graph(self, lane: DeviceLane, work: Work) -> Work:
        """See `Device.capture_graph`. Waits for the whole device first.

        Tensors that `work` reads and makes keep their addresses. Run `work` once before
        on the same lane, so that libraries have their workspaces.
        """
        graph = torch.cuda.CUDAGraph()
        stream = self._lanes[lane.number].stream
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads, such as a loader's, may use CUDA meanwhile.
        with torch.cuda.graph(
            graph, self._pool, stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay

    def close(self) -> None:
        """See `Device.close`. A stream ends the work that it was given."""


def _own(event: Event) -> CudaEvent:
    """Return the same event; refuse one of another kind of device."""
    if not isinstance(event, CudaEvent):
        raise RunError("an event of another device; use this device's new_event()")
    return event


def _poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Query until it is done or the time is up; return whether it is done."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
