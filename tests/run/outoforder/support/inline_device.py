"""A device whose lanes run each op at once, in the thread that submits it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hocket.run.device.device import Device, DeviceLane, Event, IssueOrder, Work


class InlineEvent(Event):
    """An event that is passed when it is recorded."""

    def __init__(self) -> None:
        self.is_recorded = False

    def query(self) -> bool:
        """See `Event.query`."""
        return self.is_recorded

    def synchronize(self, timeout_s: float) -> None:
        """See `Event.synchronize`."""
        assert self.is_recorded


class InlineLane(DeviceLane):
    """Runs what it is given."""

    def submit(
        self,
        work: Work,
        *,
        waits: Sequence[Event] = (),
        records: Sequence[Event] = (),
        label: str,
    ) -> None:
        """See `DeviceLane.submit`; as on a GPU, what is waited for is recorded."""
        for event in waits:
            self.wait_event(event)
        work()
        for event in records:
            self.record_event(event)

    def record_event(self, event: Event) -> None:
        """See `DeviceLane.record_event`."""
        assert isinstance(event, InlineEvent)
        event.is_recorded = True

    def wait_event(self, event: Event) -> None:
        """See `DeviceLane.wait_event`."""
        assert event.query(), "an op waits for one that was not submitted before it"

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """See `DeviceLane.keep_alive`."""


class InlineDevice(Device):
    """Lanes that are submitted to in an order in which none would wait.

    A "graph" is the work itself, which reads the tensors that it was captured with.
    """

    issue_order = IssueOrder.TOPOLOGICAL
    has_graphs = True

    def __init__(self, num_lanes: int = 2) -> None:
        device = torch.device("cpu")
        lanes = [InlineLane(i, device) for i in range(num_lanes)]
        super().__init__(device, lanes, 2**40, 60.0, None)

    def new_event(self) -> InlineEvent:
        """See `Device.new_event`."""
        return InlineEvent()

    def fork(self) -> None:
        """See `Device.fork`."""

    def join(self) -> None:
        """See `Device.join`."""

    def check(self) -> None:
        """See `Device.check`."""

    def synchronize(self, timeout_s: float) -> None:
        """See `Device.synchronize`."""

    @contextmanager
    def fork_rng(self, lane: DeviceLane, seed: int) -> Iterator[None]:
        """See `Device.fork_rng`."""
        yield

    def allocated_bytes(self) -> int:
        """See `Device.allocated_bytes`."""
        return 0

    def peak_bytes(self) -> int:
        """See `Device.peak_bytes`."""
        return 0

    def reset_peak(self) -> None:
        """See `Device.reset_peak`."""

    def capture_graph(self, lane: DeviceLane, work: Work) -> Work:
        """See `Device.capture_graph`."""
        return work

    def close(self) -> None:
        """See `Device.close`."""
