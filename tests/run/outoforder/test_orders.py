"""Every legal order in two lanes computes the same bits, and frees no memory early."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

import pytest
import torch

import hocket
from hocket.errors import RaceError
from hocket.passes.across_steps import several_steps
from hocket.passes.beside_critical_path import MeasuredProgram, with_inline
from hocket.passes.serial import serial
from tests.run.outoforder.support.played_orders import (
    TrainedByHand,
    checked_device,
    delayed_device,
    free_device,
    random_order,
    random_part,
)
from tests.run.outoforder.support.small_steps import (
    OPTIMIZERS,
    SPECIMENS,
    batches_of,
    model_of,
)

SHORT: Final = {"convolutional", "tied transformer", "lstm"}
NAMES: Final = [
    pytest.param(name, marks=[] if name in SHORT else pytest.mark.long)
    for name in SPECIMENS
]


@pytest.mark.parametrize("name", NAMES)
def test_random_orders_equal_the_serial_order(name: str) -> None:
    """Under random interleavings and delays, with released memory overwritten."""
    specimen = SPECIMENS[name]
    one = TrainedByHand(
        model_of(specimen), OPTIMIZERS["AdamW"], batches_of(specimen, 3)
    )
    expected = one.play(serial(one.program), free_device(1))
    for seed, open_device in enumerate((checked_device, delayed_device) * 2):
        order = random_order(one.program, Random(seed))
        hocket.check(order)
        found = one.play(order, open_device(len(order.lanes), seed))
        assert all(torch.equal(found[x], expected[x]) for x in expected), seed


@pytest.mark.parametrize("name", NAMES)
def test_random_orders_across_steps_equal_the_serial_order(name: str) -> None:
    """With W and U of random stages in the next step, before F reads their weights."""
    specimen = SPECIMENS[name]
    one = TrainedByHand(
        model_of(specimen), OPTIMIZERS["AdamW"], batches_of(specimen, 4)
    )
    expected = one.play(serial(one.program), free_device(1))
    for seed, open_device in enumerate((checked_device, delayed_device) * 2):
        part = random_part(one.program, Random(seed))
        order = several_steps(part)
        hocket.check(order)
        assert not any(stage.delay for stage in order.program.stages)
        found = one.play_across(part, open_device(len(part.lanes), seed))
        assert all(torch.equal(found[x], expected[x]) for x in expected), seed


def test_sees_a_missing_wait() -> None:
    """Without the events between lanes, the sanitizer raises, or a value is missing."""
    specimen = SPECIMENS["convolutional"]
    one = TrainedByHand(model_of(specimen), OPTIMIZERS["SGD"], batches_of(specimen, 2))
    costs = hocket.Costs((hocket.StageCost(1.0, 1.0, 1.0),) * one.program.num_stages)
    measured = MeasuredProgram(one.program, costs, one.step.code.footprint)
    plan = with_inline(measured, [])
    assert len(plan.schedule.lanes) == 2
    unsafe = replace(plan, waits=dict.fromkeys(plan.waits, ()))
    with pytest.raises((RaceError, KeyError)):
        one.play(plan.schedule, checked_device(2, 0), unsafe)
