"""A CPU as a device: lane 0 is the calling thread, each further lane another thread.

    calling thread   submit 1W0 to lane 1   0F0   0F1   ...          synchronize
    lane 1                     1W0 waits for an event ...   1W0   1W1   ...

Events may be waited for before they are recorded. The first error of any lane stops all
lanes: an op that waits raises it, and so do `submit` and `synchronize`. No wait is
endless. What torch keeps for each thread (`no_grad`, `autocast`) an op enters itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from hocket.errors import RunError, WaitError
from hocket.run.device.cpu_lane import (
    CpuEvent,
    CpuLane,
    FreeRunning,
    LaneGroup,
    LaneScheduler,
    RunOp,
)
from hocket.run.device.device import Device, DeviceLane, IssueOrder, Work
from hocket.run.device.generators import generator_lock, seeded
from hocket.run.device.memory import peak_bytes, reset_resident_peak, resident_bytes
from hocket.run.device.sanitize import Sanitizer

log = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")


def call_work(work: Work, label: str) -> None:
    """Run an op by calling its work."""
    work()


class CpuDevice(Device):
    """See `Device`. Its lanes share the process's cores.

    Args:
        num_lanes: the number of lanes; each beyond the first is a thread.
        budget_bytes: how much memory tensors may take.
        timeout_s: after which a wait of one lane for another ends with an error.
        run_op: runs an op, given its work and its label.
        scheduler: decides which lane may run; tests give an `Interleaver`.
        sanitizer: records events, to find races.
    """

    issue_order = IssueOrder.SIDE_LANES_FIRST

    def __init__(
        self,
        num_lanes: int = 1,
        *,
        budget_bytes: int,
        timeout_s: float,
        run_op: RunOp = call_work,
        scheduler: LaneScheduler | None = None,
        sanitizer: Sanitizer | None = None,
    ) -> None:
        self._group = LaneGroup(timeout_s, scheduler or FreeRunning(), sanitizer)
        self._lanes = tuple(CpuLane(self._group, i, run_op) for i in range(num_lanes))
        super().__init__(_CPU, self._lanes, budget_bytes, timeout_s, sanitizer)
        self._threads = [x.thread for x in self._lanes if x.thread is not None]
        for thread in self._threads:
            thread.start()

    def new_event(self) -> CpuEvent:
        """See `Device.new_event`."""
        return CpuEvent(self._group, self._calling_lane)

    def fork(self) -> None:
        """See `Device.fork`. What the caller has issued on a CPU has ended."""
        if self.sanitizer is not None:
            self.sanitizer.fork()

    def join(self) -> None:
        """See `Device.join`. The caller waits, as nothing is issued ahead on a CPU."""
        self.synchronize(self._timeout_s)

    def check(self) -> None:
        """See `Device.check`."""
        self._group.check()

    def synchronize(self, timeout_s: float) -> None:
        """See `Device.synchronize`."""
        group = self._group
        with group.scheduler.condition:
            is_idle = group.scheduler.wait_for(0, self._is_idle, timeout_s)
            busy = ", ".join(x.where for x in self._lanes if not x.is_idle)
            failure = group.failure
            if is_idle:
                group.failure = None
        if failure is not None:
            failure.reraise()
        if not is_idle:
            raise WaitError(
                f"waited {timeout_s:.1f} s; still at work: {busy}; an op is stuck, or "
                "slower than the timeout allows"
            )
        if self.sanitizer is not None:
            self.sanitizer.synchronize()

    @contextmanager
    def fork_rng(self, lane: DeviceLane, seed: int) -> Iterator[None]:
        """See `Device.fork_rng`."""
        lock, timeout_s = generator_lock(_CPU), self._timeout_s
        if not self._group.scheduler.acquire(lane.number, lock, timeout_s):
            raise WaitError(
                f"{self._lanes[lane.number].where}: waited {timeout_s:.1f} s for the "
                "default generator of the CPU, which another lane holds: it draws for "
                "longer than the timeout allows, or waits inside of fork_rng"
            )
        try:
            with seeded([torch.default_generator], seed):
                yield
        finally:
            lock.release()

    def allocated_bytes(self) -> int:
        """See `Device.allocated_bytes`."""
        return resident_bytes()

    def peak_bytes(self) -> int:
        """See `Device.peak_bytes`."""
        return peak_bytes(_CPU)

    def reset_peak(self) -> None:
        """See `Device.reset_peak`."""
        reset_resident_peak()

    def capture_graph(self, lane: DeviceLane, work: Work) -> Work:
        """See `Device.capture_graph`."""
        raise RunError(
            f"{lane}: a CPU captures no graphs; submit the ops one by one, or use a "
            "CUDA device"
        )

    def close(self) -> None:
        """See `Device.close`."""
        group = self._group
        with group.scheduler.condition:
            group.is_closing = True
            group.scheduler.release()
            group.scheduler.condition.notify_all()
        deadline_s = time.monotonic() + self._timeout_s
        for lane, thread in zip(self._lanes[1:], self._threads, strict=True):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still runs at the end of its device", lane.where)
        group.failure = None  # its traceback keeps what the op had made

    def _is_idle(self) -> bool:
        return all(lane.is_idle for lane in self._lanes)

    def _calling_lane(self) -> CpuLane:
        """Return the lane whose thread this is."""
        here = threading.current_thread()
        return next((x for x in self._lanes if x.thread is here), self._lanes[0])
