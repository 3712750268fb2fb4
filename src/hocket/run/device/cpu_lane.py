"""The lanes and events of a CPU device, and how they wait and fail together.

submit ──▶ queue ──▶ wait for events ──▶ work ──▶ record events
                           │               │
                           └── raises ◀────┴── the first error of any lane
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from hocket.errors import RunError, WaitError
from hocket.run.device.device import DeviceLane, Event, Work
from hocket.run.device.generators import GeneratorLock
from hocket.run.device.sanitize import Clock, Sanitizer

Ready: TypeAlias = Callable[[], bool]

log = logging.getLogger(__name__)

RunOp: TypeAlias = Callable[[Work, str], None]  # takes an op's work and label


@dataclass(frozen=True, slots=True)
class Failure:
    """The first error of a device's lanes."""

    error: BaseException
    traceback: TracebackType | None

    def reraise(self) -> NoReturn:
        """Raise the error where another lane, or the caller, depends on it."""
        raise self.error.with_traceback(self.traceback)


@dataclass(slots=True)
class LaneGroup:
    """The state that the lanes of one device share; `scheduler.condition` guards it.

    Args:
        timeout_s: after which a wait of one lane for another ends with an error.
        scheduler: decides which lane may run.
        sanitizer: records events.
    """

    timeout_s: float
    scheduler: LaneScheduler
    sanitizer: Sanitizer | None
    failure: Failure | None = None
    is_closing: bool = False

    def check(self) -> None:
        """Raise the first error of any lane, or that the device is closed."""
        if self.failure is not None:
            self.failure.reraise()
        if self.is_closing:
            raise RunError("the device is closed; make a new one")


class CpuEvent(Event):
    """See `Event`. Made by `CpuDevice.new_event`.

    Args:
        group: the device's lanes.
        waiter: returns the lane whose thread is calling.
    """

    def __init__(self, group: LaneGroup, waiter: Callable[[], CpuLane]) -> None:
        self._group = group
        self._waiter = waiter
        self.clock: Clock = ()  # the sanitizer's, when the event was recorded
        self._is_done = False
        self._recorder = ""  # the op that was submitted to record it
        self._failure: Failure | None = None

    def __str__(self) -> str:
        if self._recorder:
            return f"the event that {self._recorder} records"
        return "an event that no op submitted so far records"

    def query(self) -> bool:
        """See `Event.query`."""
        return self._is_done

    def synchronize(self, timeout_s: float) -> None:
        """See `Event.synchronize`."""
        self.wait(self._waiter(), timeout_s)

    def expect(self, recorder: str) -> None:
        """Note which op will record the event, for errors."""
        self._recorder = recorder

    def record(self, lane: CpuLane) -> None:
        """Let all lanes pass that wait for it; see `DeviceLane.record_event`."""
        group = self._group
        if self._is_done:
            raise RunError(
                f"{lane.where}: {self} has been recorded before; make a new event for "
                "each recording"
            )
        if group.sanitizer is not None:
            self.clock = group.sanitizer.record(lane.number)
        with group.scheduler.condition:
            self._is_done = True
            group.scheduler.condition.notify_all()

    def wait(self, lane: CpuLane, timeout_s: float) -> None:
        """Block the thread of `lane` until the event is recorded.

        Raises:
            WaitError: it was not within the time, or the device is closed.
            BaseException: the first error of any lane.
        """
        group, begin_s = self._group, time.monotonic()
        with group.scheduler.condition:
            group.scheduler.wait_for(lane.number, self._is_over, timeout_s)
            failure = self._failure or group.failure
        if self._is_done:
            return
        if failure is not None:
            failure.reraise()
        waited_s = time.monotonic() - begin_s
        reason = "the device was closed" if group.is_closing else "it was not recorded"
        raise WaitError(
            f"{lane.where}: waited {waited_s:.1f} s (of at most {timeout_s:.1f}) for "
            f"{self}, but {reason}; check that the op which records it is submitted, "
            "and that no two lanes wait for each other"
        )

    def fail(self, failure: Failure) -> None:
        """Let waits raise the error of the op that should have recorded it."""
        if not self._is_done:
            self._failure = failure

    def _is_over(self) -> bool:
        group = self._group
        return bool(self._is_done or self._failure or group.failure or group.is_closing)


@dataclass(frozen=True, slots=True)
class _Op:
    work: Work
    waits: Sequence[CpuEvent]
    records: Sequence[CpuEvent]
    label: str


class CpuLane(DeviceLane):
    """See `DeviceLane`. Made by `CpuDevice`, and run by `thread` or by the caller.

    Args:
        group: the device's lanes.
        number: position in `Device.lanes`; lane 0 runs in the calling thread.
        run_op: runs an op's work.
    """

    def __init__(self, group: LaneGroup, number: int, run_op: RunOp) -> None:
        super().__init__(number, torch.device("cpu"))
        self._group = group
        self._run_op = run_op
        self._queue: deque[_Op] = deque()
        self._running: str | None = None  # the op's label
        self.thread: threading.Thread | None = None
        if number > 0:
            self.thread = threading.Thread(
                target=self._serve, name=f"hocket {self}", daemon=True
            )

    @property
    def where(self) -> str:
        """The lane and the op that it is at, for errors."""
        queued = [op.label for op in tuple(self._queue)]  # other threads change it
        label = next(iter(queued), None) if self._running is None else self._running
        return f"{self}, no op" if label is None else f"{self}, op {label}"

    @property
    def is_idle(self) -> bool:
        """Whether no op runs or is queued."""
        return self._running is None and not self._queue

    def submit(
        self,
        work: Work,
        *,
        waits: Sequence[Event] = (),
        records: Sequence[Event] = (),
        label: str,
    ) -> None:
        """See `DeviceLane.submit`. On lane 0 it returns when the op has ended."""
        op = _Op(work, [*map(_own, waits)], [*map(_own, records)], label)
        for event in op.records:
            event.expect(f"op {label} in {self}")
        if self.thread is None:
            self._play(op)
            return
        self._group.check()
        scheduler = self._group.scheduler
        with scheduler.condition:
            self._queue.append(op)
            scheduler.condition.notify_all()
        scheduler.switch(0)

    def record_event(self, event: Event) -> None:
        """See `DeviceLane.record_event`."""
        _own(event).record(self)
        self._group.scheduler.switch(self.number)

    def wait_event(self, event: Event) -> None:
        """See `DeviceLane.wait_event`. It blocks the lane's thread."""
        group, own = self._group, _own(event)
        group.scheduler.switch(self.number)
        own.wait(self, group.timeout_s)
        if group.sanitizer is not None:
            group.sanitizer.wait(self.number, own.clock)

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """See `DeviceLane.keep_alive`. An op on a CPU holds what it reads."""

    def _serve(self) -> None:
        """Run the ops of the queue, one by one, until the device is closed."""
        condition = self._group.scheduler.condition
        while self._await_op():
            try:
                self._play(self._queue[0])
            except BaseException:
                # `_play` has kept it for the lanes and the caller that depend on it.
                log.debug("%s has failed", self.where, exc_info=True)
            with condition:
                self._queue.popleft()
                condition.notify_all()

    def _await_op(self) -> bool:
        """Wait for an op in the queue; return False when the device is closed."""
        group = self._group
        with group.scheduler.condition:
            group.scheduler.wait_for(
                self.number, lambda: bool(self._queue) or group.is_closing, None
            )
            return not group.is_closing

    def _play(self, op: _Op) -> None:
        """Run one op in the calling thread, between its waits and its recordings."""
        group = self._group
        self._running = op.label
        try:
            group.check()
            group.scheduler.switch(self.number)
            for event in op.waits:
                self.wait_event(event)
            self._run_op(op.work, op.label)
            for event in op.records:
                self.record_event(event)
        except BaseException as error:
            self._fail(error, op)
            raise
        finally:
            self._running = None

    def _fail(self, error: BaseException, op: _Op) -> None:
        """Keep the first error of the device, and wake all that wait."""
        group = self._group
        with group.scheduler.condition:
            if group.failure is None:
                error.add_note(f"in op {op.label}, {self}")
                group.failure = Failure(error, error.__traceback__)
            for event in op.records:
                event.fail(group.failure)
            group.scheduler.condition.notify_all()


def _own(event: Event) -> CpuEvent:
    """Return the same event; refuse one of another kind of device."""
    if not isinstance(event, CpuEvent):
        raise RunError(
            "an event of another device; make it with this one's new_event()"
        )
    return event


class LaneScheduler(ABC):
    """Decides in which order the threads of one device run.

    Attributes:
        condition: guards the device's state, and is notified of each change.
    """

    condition: threading.Condition

    @abstractmethod
    def wait_for(self, lane: int, ready: Ready, timeout_s: float | None) -> bool:
        """Block the thread of a lane until `ready()`; call it with `condition` held.

        Returns:
            `ready()`, which is false if the time is up or no lane can make it true.
        """

    @abstractmethod
    def acquire(self, lane: int, lock: GeneratorLock, timeout_s: float) -> bool:
        """Acquire a lock for the thread of a lane; return whether it was acquired."""

    @abstractmethod
    def switch(self, lane: int) -> None:
        """Let another lane run first, if the scheduler chooses one."""

    @abstractmethod
    def release(self) -> None:
        """Let all lanes run freely from now on, since the device ends."""


class FreeRunning(LaneScheduler):
    """All lanes run at once, as the system schedules their threads."""

    def __init__(self) -> None:
        self.condition = threading.Condition()

    def wait_for(self, lane: int, ready: Ready, timeout_s: float | None) -> bool:
        """See `LaneScheduler.wait_for`."""
        return self.condition.wait_for(ready, timeout_s)

    def acquire(self, lane: int, lock: GeneratorLock, timeout_s: float) -> bool:
        """See `LaneScheduler.acquire`."""
        return lock.acquire(timeout_s)

    def switch(self, lane: int) -> None:
        """See `LaneScheduler.switch`."""

    def release(self) -> None:
        """See `LaneScheduler.release`."""
