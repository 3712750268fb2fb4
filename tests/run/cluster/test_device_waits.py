"""What a device waits for has a deadline, which counts from when it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hocket.errors import WaitError
from hocket.run.cluster.device_waits import DeviceWaits

TIMEOUT_S = 0.2
LONG_S = 20.0  # ends a test that would hang


@dataclass
class Operation:
    """An operation, and an event before it, that a test ends by hand."""

    is_over: bool = False
    is_reached: bool = True
    num_waits: int = 0

    def is_completed(self) -> bool:
        """See `Posted`."""
        return self.is_over

    def wait(self) -> None:
        """The device will wait; the host does not."""
        self.num_waits += 1

    def query(self) -> bool:
        """See `Reached`."""
        return self.is_reached


@dataclass
class Aborts:
    """Notes when everything was aborted."""

    done: threading.Event = field(default_factory=threading.Event)
    threads: list[str] = field(default_factory=list)

    def __call__(self) -> None:
        """Note it."""
        self.threads.append(threading.current_thread().name)
        self.done.set()


def waits_for(
    operation: Operation, abort: Callable[[], None], timeout_s: float = TIMEOUT_S
) -> DeviceWaits:
    """Waits of a device that has one operation to wait for."""
    waits = DeviceWaits(timeout_s, abort, lambda: operation)
    waits.wait(operation, "F0>1, step 3, from rank 0")
    return waits


def test_the_host_goes_on_and_a_late_operation_is_aborted() -> None:
    """NCCL's own watchdog would end the process, without a report."""
    in_time = Operation()
    begin_s = time.monotonic()
    waits_for(in_time, Aborts(), LONG_S)
    assert time.monotonic() - begin_s < LONG_S
    in_time.is_over = True

    operation, aborts = Operation(), Aborts()
    begin_s = time.monotonic()
    waits = waits_for(operation, aborts)
    assert operation.num_waits == 1

    assert aborts.done.wait(LONG_S)
    assert time.monotonic() - begin_s >= TIMEOUT_S

    assert aborts.threads == ["hocket device waits"]  # the host may be stuck
    assert not waits.all_in_time
    with pytest.raises(WaitError, match=r"F0>1, step 3, from rank 0: .* 0\.2 s"):
        waits.check()
    with pytest.raises(WaitError, match="from rank 0"):
        waits.wait(Operation(), "the next message")


def test_time_counts_from_when_the_device_waits() -> None:
    """Past danger: a long op, or a pause, before the wait was taken for a dead peer."""
    operation, aborts = Operation(is_reached=False), Aborts()
    waits = waits_for(operation, aborts)

    assert not aborts.done.wait(2 * TIMEOUT_S)
    waits.check()
    operation.is_reached = True

    assert aborts.done.wait(LONG_S)


def test_what_comes_in_time_is_forgotten() -> None:
    """The thread goes on to later waits."""
    operation, aborts = Operation(), Aborts()
    waits = waits_for(operation, aborts)
    operation.is_over = True
    assert waits.all_in_time
    later = Operation(is_over=True)
    waits.wait(later, "another message")

    assert not aborts.done.wait(2 * TIMEOUT_S)
    waits.check()

    stuck = Operation()
    waits.wait(stuck, "the last message")
    assert aborts.done.wait(LONG_S)
    with pytest.raises(WaitError, match="the last message"):
        waits.check()
