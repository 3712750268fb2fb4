"""An emulated device keeps the times that it is given, and does not compute."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import NoReturn

from hocket.run.device.device import Device
from hocket.run.device.stopwatch import make_stopwatch
from tests.run.device.support.emulated import emulated_device

OP_S = 0.02
EARLY_S = 1e-4  # the resolution of a sleep
TRIES = 50


def compute() -> NoReturn:
    """What an emulated op must not do."""
    raise AssertionError("an emulated op has computed")


def op_seconds(label: str) -> float | None:
    """Forwards and backwards sleep; everything else does its work."""
    return OP_S if label[1] in "FB" else None


def make_device(num_lanes: int) -> Device:
    """An emulated device."""
    return emulated_device(op_seconds, num_lanes, budget_bytes=1, timeout_s=10.0)


def test_ops_sleep_instead_of_computing() -> None:
    """One after the other in a lane, at once in several; a message is real.

    On a busy machine sleeps are late: one of many tries must be in time.
    """
    for _ in range(TRIES):
        spent_s = sleep_in_two_lanes()
        assert spent_s >= 4 * OP_S - EARLY_S
        if spent_s < 7 * OP_S:
            return
    raise AssertionError(f"two lanes took {spent_s} s")


def sleep_in_two_lanes() -> float:
    """Seconds that two lanes need for four forwards each."""
    sent: list[int] = []
    with make_device(2) as device:
        begin_s = perf_counter()
        for i in range(4):
            device.lanes[1].submit(compute, label=f"1F{i}")
        for i in range(4):
            device.lanes[0].submit(compute, label=f"0F{i}")
            device.lanes[0].submit(partial(sent.append, i), label=f"0SEND_F{i}")
        device.synchronize(10.0)
        spent_s = perf_counter() - begin_s
    assert sent == [0, 1, 2, 3]
    return spent_s


def test_an_event_delays_an_op_by_what_it_waits_for() -> None:
    """A lane that waits for two ops of another one begins after both."""
    with make_device(2) as device:
        event = device.new_event()
        watches = [make_stopwatch(3, device.torch_device) for _ in device.lanes]

        def submit(lane: int, i: int, label: str) -> None:
            device.lanes[lane].submit(partial(watches[lane].start, i), label="0SEND_F0")
            device.lanes[lane].submit(compute, label=label)
            device.lanes[lane].submit(partial(watches[lane].end, i), label="0SEND_F0")

        device.lanes[1].submit(int, waits=[event], label="1RECV_F0")
        submit(1, 0, "1F0")
        submit(0, 0, "0F0")
        submit(0, 1, "0F1")
        device.lanes[0].submit(int, records=[event], label="0SEND_F1")
        device.synchronize(10.0)
        (start0_s, end0_s), (start1_s, end1_s) = [
            watch.read().value for watch in watches
        ]

    assert min((end0_s - start0_s)[:2]) >= OP_S - EARLY_S
    assert end0_s[0] <= start0_s[1] <= end0_s[1] <= start1_s[0]
    assert end1_s[0] - start1_s[0] >= OP_S - EARLY_S
    assert (start1_s[1], end1_s[1]) == (0.0, 0.0)
