"""The interface of a device: lanes, events, random state, memory and capture.

One host thread issues the ops of all lanes of a device. Each lane runs its ops in the
order in which they were submitted; between lanes only events order anything:

    lane 0   1F0 ──record e──▶ 1F1 ────────▶ ...
                      │
    lane 1         wait e ──▶ 1W0 ──▶ ...

An event is recorded once, by one op, as by `torch.cuda.Stream.record_event`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import ClassVar, Final, Self, TypeAlias

import torch
from torch import Tensor

from hocket.run.device.sanitize import Sanitizer

Work: TypeAlias = Callable[[], object]  # its result is not used


class IssueOrder(Enum):
    """The order in which the host thread must submit the ops of several lanes."""

    TOPOLOGICAL = auto()  # record before wait: CUDA ignores a wait on no recording
    SIDE_LANES_FIRST = auto()  # lane 0 runs in the calling thread, and would block it


class Event(ABC):
    """A point in a lane's work. One op records it, once; any number of ops wait."""

    @abstractmethod
    def query(self) -> bool:
        """Return whether all work submitted to the recording lane before it is done."""

    @abstractmethod
    def synchronize(self, timeout_s: float) -> None:
        """Block the calling thread until the work before the event is done.

        Raises:
            WaitError: it is not done after `timeout_s` seconds.
            BaseException: the error of the op that should have recorded the event.
        """


class DeviceLane(ABC):
    """An ordered list of ops on one device: one CUDA stream, or one thread.

    Args:
        number: position in `Device.lanes`.
        device: the torch device, with its index.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number: Final = number
        self._device = device

    def __str__(self) -> str:
        return f"lane {self.number} of {self._device}"

    @abstractmethod
    def submit(
        self,
        work: Work,
        *,
        waits: Sequence[Event] = (),
        records: Sequence[Event] = (),
        label: str,
    ) -> None:
        """Append an op to the lane.

        Args:
            work: issues or does the op's work; called in the lane's context.
            waits: events which must have been passed before `work` begins.
            records: events which are passed when `work` is done.
            label: the op's text in errors, such as `2F0`.

        Raises:
            BaseException: the error of `work`, where the calling thread runs it, or of
                an earlier op of the device.
        """

    @abstractmethod
    def record_event(self, event: Event) -> None:
        """Record an event in the middle of an op; called by its `work`.

        Raises:
            RunError: the event has been recorded before.
        """

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Let the rest of the op wait for an event; called by its `work`.

        Raises:
            WaitError: the event was not recorded within the device's timeout.
        """

    @abstractmethod
    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of other lanes' tensors while this lane's work so far runs.

        A CUDA allocator gives freed memory to the next op of the lane that allocated
        it, even while another lane reads it. Call it before the host lets them go.
        """


class Device(ABC):
    """One torch device, its lanes, and what a process has once for each device.

    Args:
        torch_device: the device of its tensors.
        lanes: the lanes, by number.
        budget_bytes: the bytes that tensors may take.
        timeout_s: the longest wait of one lane for another.
        sanitizer: checks the accesses of ops for races; None if they are not checked.

    Attributes:
        issue_order: the order in which ops of several lanes must be submitted.
        has_graphs: whether `capture_graph` works.
    """

    issue_order: ClassVar[IssueOrder]
    has_graphs: ClassVar[bool] = False

    def __init__(
        self,
        torch_device: torch.device,
        lanes: Sequence[DeviceLane],
        budget_bytes: int,
        timeout_s: float,
        sanitizer: Sanitizer | None,
    ) -> None:
        self.torch_device: Final = torch_device
        self.lanes: Final = tuple(lanes)
        self.budget_bytes: Final = budget_bytes
        self.sanitizer: Final = sanitizer
        self._timeout_s = timeout_s

    @abstractmethod
    def new_event(self) -> Event:
        """Make an event that no op has recorded."""

    @abstractmethod
    def fork(self) -> None:
        """Let all lanes wait for what the caller has issued outside of them so far."""

    @abstractmethod
    def join(self) -> None:
        """Let what the caller issues from now on wait for the work of all lanes.

        Raises:
            BaseException: the first error of any lane, where the device knows it.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise the first error of any lane that is known by now.

        What waits in one lane for another device calls this in between: the op that
        the other device needs may have failed in another lane.

        Raises:
            BaseException: the error, with a note of lane and op.
        """

    @abstractmethod
    def synchronize(self, timeout_s: float) -> None:
        """Block the calling thread until all lanes have done all their work.

        The error of an op is raised once; then the device may be used again.

        Raises:
            WaitError: a lane is not done after `timeout_s` seconds; names lane and op.
            BaseException: the first error of any lane, with a note of lane and op.
        """

    @abstractmethod
    def fork_rng(self, lane: DeviceLane, seed: int) -> AbstractContextManager[None]:
        """Seed the default generators of the device for a part of an op of `lane`.

        torch has one default generator for each device, which all lanes share. The lane
        holds it until the block ends, other lanes wait for it, and the state from
        before comes back. Blocks of one lane may be nested.

        Raises:
            WaitError: another lane holds the generator for the device's timeout.
        """

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """See `DeviceLane.keep_alive`; of the lane whose op calls this."""
        del tensors  # an op holds what it reads until it is done, but on a GPU

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes in use now: by tensors, or by the whole process on a CPU."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the largest `allocated_bytes` since the last `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new peak at what is allocated now.

        Raises:
            RunError: the system does not let the process reset its peak.
        """

    @abstractmethod
    def capture_graph(self, lane: DeviceLane, work: Work) -> Work:
        """Capture what `work` issues as a graph, without running it.

        Args:
            lane: the lane in which the capture begins and ends. `work` may submit to
                other lanes, if they wait for an event of this lane first and it waits
                for theirs last.
            work: issues the ops; runs once.

        Graphs of one device share their memory: they must not run at the same time,
        and what one has made is to be read before another runs.

        Returns:
            A function that replays the graph, to be submitted to `lane`.

        Raises:
            RunError: this kind of device has no graphs.
        """

    @abstractmethod
    def close(self) -> None:
        """Discard ops that have not begun, and end the lanes; again: do nothing.

        Waits for running ops at most as long as the device's timeout.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Join the lanes after a clean block, and close the device in any case."""
        try:
            if kind is None:
                self.join()
        finally:
            self.close()
