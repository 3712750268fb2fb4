"""Lanes that draw at the same time get the random numbers that they get alone."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.errors import WaitError
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.cpu_lane import LaneScheduler
from tests.run.device.support.interleaver import Interleaver, ScheduleChoice

NUM_LANES = 3
NUM_OPS = 8


def mask(seed: int) -> Tensor:
    """Two dropout masks of a forward with this seed, when nothing else draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([F.dropout(torch.ones(20_000)) for _ in range(2)])


def masks_at_once(scheduler: LaneScheduler | None) -> dict[int, Tensor]:
    """The masks of all lanes' ops, by seed."""
    masks: dict[int, Tensor] = {}
    with CpuDevice(
        NUM_LANES, budget_bytes=1, timeout_s=10.0, scheduler=scheduler
    ) as device:

        def draw(lane: int, seed: int) -> None:
            with device.fork_rng(device.lanes[lane], seed):
                first = F.dropout(torch.ones(20_000))
                device.lanes[lane].record_event(device.new_event())  # lanes may switch
                second = F.dropout(torch.ones(20_000))
            masks[seed] = torch.stack([first, second])

        for i in range(NUM_OPS):
            for lane in reversed(range(NUM_LANES)):
                seed = 100 * lane + i
                device.lanes[lane].submit(partial(draw, lane, seed), label=f"0F{i}")
        device.synchronize(10.0)
    return masks


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_lanes_draw_what_they_draw_alone(seed: int | None) -> None:
    """Freely running, and in interleavings that switch lanes between two draws."""
    scheduler = (
        None if seed is None else Interleaver(seed, NUM_LANES, ScheduleChoice.UNIFORM)
    )
    masks = masks_at_once(scheduler)

    assert len(masks) == NUM_LANES * NUM_OPS
    for own, drawn in masks.items():
        assert torch.equal(drawn, mask(own))


def test_the_callers_random_numbers_stay() -> None:
    """What was there before comes back, also after an error and from within blocks."""
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    with CpuDevice(budget_bytes=1, timeout_s=1.0) as device:
        (lane,) = device.lanes
        with device.fork_rng(lane, 1):
            outer = torch.rand(1)
            with device.fork_rng(lane, 2):
                torch.rand(7)
            after = torch.rand(1)
        with pytest.raises(ArithmeticError), device.fork_rng(lane, 3):
            raise ArithmeticError

    assert torch.equal(torch.default_generator.get_state(), before)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), torch.cat([outer, after]))


def test_a_lane_that_draws_for_too_long_is_an_error() -> None:
    """It names the lane and the op that wait for the generator, and the seconds."""
    drawing, done = threading.Event(), threading.Event()

    def draw_long() -> None:
        with device.fork_rng(device.lanes[1], 1):
            drawing.set()
            done.wait(20.0)

    def draw() -> None:
        drawing.wait(20.0)
        with device.fork_rng(device.lanes[0], 2):
            pass

    with CpuDevice(2, budget_bytes=1, timeout_s=0.1) as device:
        device.lanes[1].submit(draw_long, label="0F0")
        with pytest.raises(WaitError, match=r"lane 0 of cpu, op 0F1: waited 0\.1 s"):
            device.lanes[0].submit(draw, label="0F1")
        done.set()
        with pytest.raises(WaitError, match="default generator of the CPU"):
            device.synchronize(10.0)
