"""Lanes keep their order, wait for events, run at once, and fail together."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import pytest
import torch

from hocket.errors import RunError, WaitError
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.device import IssueOrder

NUM_BYTES = 1 << 30


def make_device(num_lanes: int = 3, timeout_s: float = 10.0) -> CpuDevice:
    """A CPU with lanes in threads."""
    return CpuDevice(num_lanes, budget_bytes=NUM_BYTES, timeout_s=timeout_s)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A CPU with three lanes that wait for at most ten seconds."""
    with make_device() as device:
        yield device


def nothing() -> None:
    """The work of an op that only waits or records."""


def fail() -> NoReturn:
    """The work of an op that fails."""
    raise ArithmeticError("no good")


def test_a_lane_runs_its_ops_in_the_order_of_submission(device: CpuDevice) -> None:
    """Each lane by itself, one op at a time, lane 0 in the calling thread."""
    ran: list[list[int]] = [[], [], []]
    threads: list[set[int]] = [set(), set(), set()]

    def work(lane: int, i: int) -> None:
        ran[lane].append(i)
        threads[lane].add(threading.get_ident())

    for i in range(100):
        for lane in device.lanes:
            lane.submit(partial(work, lane.number, i), label=f"op {i}")
    device.synchronize(10.0)

    assert ran == [list(range(100))] * 3
    assert threads[0] == {threading.get_ident()}
    assert len(set.union(*threads)) == 3


def test_an_op_begins_after_the_events_it_waits_for(device: CpuDevice) -> None:
    """Also where it was submitted long before the op that records the event."""
    assert device.issue_order is IssueOrder.SIDE_LANES_FIRST
    ran: list[int] = []
    events = [device.new_event() for _ in range(60)]
    # Lane i % 3 runs op i, which waits for op i - 1: a chain through all lanes.
    for side_lane_first in (2, 1, 0):
        for i in range(side_lane_first, 60, 3):
            device.lanes[i % 3].submit(
                partial(ran.append, i),
                waits=[events[i - 1]] if i else [],
                records=[events[i]],
                label=f"op {i}",
            )
    device.synchronize(10.0)

    assert ran == list(range(60))
    assert all(event.query() for event in events)


def test_work_records_and_waits_in_the_middle_of_an_op(device: CpuDevice) -> None:
    """As a whole backward hands on its input's gradient before it goes on."""
    zero, one, _ = device.lanes
    half, answer = device.new_event(), device.new_event()
    ran: list[str] = []

    def backward() -> None:
        ran.append("I")
        zero.record_event(half)
        zero.wait_event(answer)
        ran.append("W")

    one.submit(partial(ran.append, "next"), waits=[half], records=[answer], label="1B0")
    zero.submit(backward, label="2B0")

    assert ran == ["I", "next", "W"]


def test_two_lanes_overlap() -> None:
    """Ops that sleep take as long as one lane's, not as long as their sum.

    On a busy machine sleeps are late: the best of some tries counts.
    """

    def spent_s(device: CpuDevice) -> float:
        begin_s = time.perf_counter()
        for lane in (1, 0):
            for _ in range(3):
                device.lanes[lane].submit(partial(time.sleep, 0.02), label="F")
        device.synchronize(10.0)
        return time.perf_counter() - begin_s

    with make_device(2) as device:
        assert min(spent_s(device) for _ in range(5)) < 0.75 * 6 * 0.02


def test_a_side_lane_computes_as_torch_is_set_up(device: CpuDevice) -> None:
    """With the process's number of threads and data type, and gradients on."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen: list[tuple[int, bool]] = []
        device.lanes[1].submit(
            lambda: seen.append((torch.get_num_threads(), torch.is_grad_enabled())),
            label="0F0",
        )
        device.synchronize(10.0)
    finally:
        torch.set_num_threads(num_threads)

    assert seen == [(1, True)]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_error_reaches_all_that_depend_on_it(failing: int) -> None:
    """A waiting lane, a waiting caller, a later op: all raise it, and none hangs."""
    ran: list[str] = []
    with make_device(3, 30.0) as device:
        recorded, never = device.new_event(), device.new_event()
        device.lanes[2].submit(partial(ran.append, "a"), waits=[never], label="2W0")
        begin_s = time.monotonic()
        with contextlib.suppress(ArithmeticError):  # lane 0 raises it here
            device.lanes[failing].submit(fail, records=[recorded], label="2F0")
        with pytest.raises(ArithmeticError):
            recorded.synchronize(30.0)
        with pytest.raises(ArithmeticError):
            never.synchronize(30.0)
        with pytest.raises(ArithmeticError):
            device.lanes[1].submit(partial(ran.append, "b"), label="2F1")
        with pytest.raises(ArithmeticError) as caught:
            device.synchronize(30.0)

    assert time.monotonic() - begin_s < 10.0
    assert caught.value.__notes__ == [f"in op 2F0, lane {failing} of cpu"]
    assert ran == []


def test_a_device_works_on_after_its_error_was_raised(device: CpuDevice) -> None:
    """`synchronize` raises it once; what was queued behind it is gone."""
    ran: list[str] = []
    lost = device.new_event()
    device.lanes[1].submit(partial(time.sleep, 0.01), label="0F0")
    device.lanes[1].submit(fail, label="0F1")
    device.lanes[1].submit(partial(ran.append, "a"), records=[lost], label="0F2")
    with pytest.raises(ArithmeticError):
        device.synchronize(10.0)
    device.lanes[1].submit(partial(ran.append, "b"), label="0F3")
    device.synchronize(10.0)

    assert ran == ["b"]
    with pytest.raises(ArithmeticError):
        lost.synchronize(10.0)


def test_a_wait_that_is_too_long_names_lane_op_and_seconds() -> None:
    """Here two lanes wait for each other."""
    with make_device(3, 0.1) as device:
        a, b = device.new_event(), device.new_event()
        device.lanes[1].submit(nothing, waits=[a], records=[b], label="1B0")
        device.lanes[2].submit(nothing, waits=[b], records=[a], label="1W0")
        with pytest.raises(WaitError) as caught:
            device.synchronize(10.0)

    message = str(caught.value)
    assert "lane 1 of cpu, op 1B0" in message or "lane 2 of cpu, op 1W0" in message
    assert "waited 0.1 s" in message
    assert "records" in message


def test_a_wait_for_what_no_op_records_says_so() -> None:
    """The op that records it was forgotten, or comes too late."""
    with contextlib.closing(make_device(1, 0.05)) as device:
        event = device.new_event()
        with pytest.raises(WaitError, match="no op submitted so far records"):
            device.lanes[0].submit(nothing, waits=[event], label="0F0")


def test_an_op_that_is_stuck_is_named_by_synchronize() -> None:
    """And closing the device does not wait for it any longer than the timeout."""
    stuck = threading.Event()
    device = make_device(2, 0.1)
    device.lanes[1].submit(partial(stuck.wait, 20.0), label="3W1")
    with pytest.raises(WaitError, match=r"waited 0\.1 s.* lane 1 of cpu, op 3W1"):
        device.synchronize(0.1)
    begin_s = time.monotonic()
    device.close()
    closed_s = time.monotonic() - begin_s
    stuck.set()

    assert closed_s < 5.0


def leave_idle(device: CpuDevice) -> None:
    """The lanes have nothing to do."""


def wait_for_ever(device: CpuDevice) -> None:
    """A lane waits for an event that no op records."""
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        device.lanes[1].wait_event(device.new_event())

    device.lanes[1].submit(wait, label="0F0")
    assert is_waiting.wait(10.0)


def queue_much(device: CpuDevice) -> None:
    """A lane has more to do than anybody waits for."""
    for _ in range(1000):
        device.lanes[1].submit(partial(time.sleep, 0.01), label="0F0")


@pytest.mark.parametrize("prepare", [leave_idle, wait_for_ever, queue_much])
def test_close_ends_all_threads_at_once(prepare: Callable[[CpuDevice], None]) -> None:
    """Whatever the lanes do or wait for; a second call does nothing."""
    device = make_device(3, 60.0)
    prepare(device)
    begin_s = time.monotonic()
    device.close()
    device.close()

    assert time.monotonic() - begin_s < 5.0
    assert not [x for x in threading.enumerate() if x.name.startswith("hocket lane")]
    with pytest.raises(RunError, match="closed"):
        device.lanes[1].submit(nothing, label="0F1")


def test_an_event_is_recorded_once(device: CpuDevice) -> None:
    """A second recording would let waiting ops pass that belong to the first."""
    event = device.new_event()
    device.lanes[0].submit(nothing, records=[event], label="0F0")
    with pytest.raises(RunError, match=r"op 0F1: .* has been recorded before"):
        device.lanes[0].submit(nothing, records=[event], label="0F1")
    with pytest.raises(RunError):
        device.synchronize(1.0)


def test_a_cpu_captures_no_graph(device: CpuDevice) -> None:
    """It says so, and does not run the work instead."""
    with pytest.raises(RunError, match="lane 0 of cpu: a CPU captures no graphs"):
        device.capture_graph(device.lanes[0], fail)


def test_the_peak_of_memory_can_begin_anew(device: CpuDevice) -> None:
    """So that each step may have its own."""
    num_bytes = 64 << 20
    before = device.allocated_bytes()
    # A mapping of our own: what malloc frees may stay with the process.
    with mmap.mmap(-1, num_bytes) as held:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            held[offset] = 1
        assert device.allocated_bytes() > before + num_bytes // 2
    assert device.peak_bytes() > before + num_bytes // 2
    device.reset_peak()
    assert device.peak_bytes() < before + num_bytes // 2
    assert device.budget_bytes == NUM_BYTES
