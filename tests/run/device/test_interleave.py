"""A seed gives one interleaving of a CPU's lanes, again and again."""

from __future__ import annotations

import time
from functools import partial

import pytest

from hocket.errors import WaitError
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.device import Event
from tests.run.device.support.interleaver import Interleaver, ScheduleChoice

NUM_LANES = 3
OPS_PER_LANE = 4


def order_of_ops(
    seed: int, draw: ScheduleChoice
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The labels of some ops as they ran, and the lanes that were picked."""
    scheduler = Interleaver(seed, NUM_LANES, draw)
    ran: list[str] = []
    with CpuDevice(
        NUM_LANES, budget_bytes=1, timeout_s=20.0, scheduler=scheduler
    ) as device:
        event = device.new_event()
        for lane in reversed(device.lanes):
            for i in range(OPS_PER_LANE):
                label = f"{lane.number}F{i}"
                device.lanes[lane.number].submit(
                    partial(ran.append, label),
                    waits=[event] if label == "1F2" else [],
                    records=[event] if label == "0F1" else [],
                    label=label,
                )
        device.synchronize(20.0)
    return tuple(ran), tuple(scheduler.picked)


@pytest.mark.parametrize("draw", ScheduleChoice)
def test_a_seed_replays_its_interleaving(draw: ScheduleChoice) -> None:
    """Op by op, and choice by choice."""
    for seed in range(20):
        assert order_of_ops(seed, draw) == order_of_ops(seed, draw)


@pytest.mark.parametrize("draw", ScheduleChoice)
def test_seeds_give_many_legal_interleavings(draw: ScheduleChoice) -> None:
    """Each keeps the lanes' own orders and the event; 200 seeds give more than 30."""
    begin_s = time.monotonic()
    orders = {order_of_ops(seed, draw)[0] for seed in range(200)}

    assert len(orders) > 30
    for ran in orders:
        assert ran.index("0F1") < ran.index("1F2")
        for lane in range(NUM_LANES):
            own = [label for label in ran if label.startswith(str(lane))]
            assert own == [f"{lane}F{i}" for i in range(OPS_PER_LANE)]
    assert time.monotonic() - begin_s < 30.0


def last_value(seed: int, draw: ScheduleChoice) -> int:
    """What two lanes leave in a counter that both read and then write."""
    counter = 0
    with CpuDevice(
        2, budget_bytes=1, timeout_s=20.0, scheduler=Interleaver(seed, 2, draw)
    ) as device:

        def add_one(lane: int) -> None:
            nonlocal counter
            read = counter
            device.lanes[lane].record_event(device.new_event())
            counter = read + 1

        for lane in (1, 0):
            device.lanes[lane].submit(partial(add_one, lane), label=f"lane {lane}")
        device.synchronize(20.0)
    return counter


@pytest.mark.parametrize("draw", ScheduleChoice)
def test_a_lost_update_is_found_by_some_seed(draw: ScheduleChoice) -> None:
    """A switch of lanes within both ops loses one; else both count."""
    values = [last_value(seed, draw) for seed in range(60)]
    assert set(values) == {1, 2}
    assert values == [last_value(seed, draw) for seed in range(60)]


def test_lanes_that_wait_for_each_other_fail_at_once() -> None:
    """No lane can run, so none waits for the timeout."""
    begin_s = time.monotonic()
    with CpuDevice(
        3, budget_bytes=1, timeout_s=60.0, scheduler=Interleaver(0, 3)
    ) as device:
        a, b = device.new_event(), device.new_event()
        device.lanes[1].submit(print, waits=[a], records=[b], label="1B0")
        with pytest.raises(WaitError, match=r"lane \d of cpu, op 1[BW]0"):
            run_second_half(device, b, a)

    assert time.monotonic() - begin_s < 10.0


def run_second_half(device: CpuDevice, waits: Event, records: Event) -> None:
    """The other of two ops that wait for each other; the error may come at once."""
    device.lanes[2].submit(print, waits=[waits], records=[records], label="1W0")
    device.synchronize(60.0)
