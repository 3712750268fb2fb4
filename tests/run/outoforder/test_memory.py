"""A step takes the memory that was predicted, and never more than it is allowed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.core.footprint import issue_order, plan_memory
from hocket.core.schedule import Lane
from hocket.errors import FitError
from hocket.passes.across_steps import carry_weight_gradients
from hocket.passes.beside_critical_path import (
    MeasuredProgram,
    beside_critical_path,
    longest_path,
)
from hocket.passes.serial import serial
from tests.run.outoforder.support.played_orders import (
    TrainedByHand,
    random_order,
    random_part,
)
from tests.run.outoforder.support.small_steps import (
    OPTIMIZERS,
    SPECIMENS,
    Specimen,
    batches_of,
    loss,
    model_of,
)

WIDTH = 32


def wide() -> nn.Module:
    """Layers whose activations are larger than their weights."""
    modules: list[nn.Module] = []
    for width in (3, *[WIDTH] * 5):
        modules += [
            nn.Conv2d(width, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
        ]
    modules += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 4)]
    return nn.Sequential(*modules)


def batch() -> tuple[Any, Any]:
    """Images that are large enough for activations to count."""
    return torch.randn(2, 3, 24, 24, dtype=torch.float64), torch.randint(0, 4, (2,))


WIDE = Specimen(wide, batch)


@cache
def trained() -> TrainedByHand:
    """The model, captured once for all tests."""
    return TrainedByHand(model_of(WIDE), OPTIMIZERS["AdamW"], batches_of(WIDE, 2))


@cache
def measured() -> MeasuredProgram:
    """Its program, in which all ops of one kind take equally long."""
    one = trained()
    cost = hocket.StageCost(1.0, 1.0, 1.0, update_s=0.2)
    costs = hocket.Costs((cost,) * one.program.num_stages)
    return MeasuredProgram(one.program, costs, one.footprint())


def test_serial_order_takes_what_is_predicted() -> None:
    """Within 5 %, by the allocator's own count."""
    plan = plan_memory(serial(trained().program), measured().footprint)
    found = trained().allocated_bytes(plan)
    assert found == pytest.approx(plan.peak_bytes, rel=0.05)


@pytest.mark.parametrize("name", SPECIMENS)
def test_all_small_models_take_what_is_predicted(name: str) -> None:
    """Their serial order, and an order in two lanes no more than that."""
    specimen = SPECIMENS[name]
    one = TrainedByHand(
        model_of(specimen), OPTIMIZERS["AdamW"], batches_of(specimen, 2)
    )
    footprint = one.footprint()
    plan = plan_memory(serial(one.program), footprint)
    assert one.allocated_bytes(plan) == pytest.approx(plan.peak_bytes, rel=0.05)
    plan = plan_memory(random_order(one.program, Random(0)), footprint)
    assert one.allocated_bytes(plan) <= plan.peak_bytes * 1.01


def test_orders_in_two_lanes_take_no_more_than_is_predicted() -> None:
    """What is predicted holds for the slowest other lane: some timings take less."""
    one, facts = trained(), measured()
    orders = [longest_path(one.program, facts.costs)]
    orders += [random_order(one.program, Random(seed)) for seed in range(6)]
    plans = [plan_memory(order, facts.footprint) for order in orders]
    plans.append(beside_critical_path(facts))
    for plan in plans:
        assert one.allocated_bytes(plan) <= plan.peak_bytes * 1.01


def test_orders_across_steps_take_no_more_than_is_predicted() -> None:
    """What W of the step before still reads is there, too; in one lane it is exact."""
    one, facts = trained(), measured()
    parts = [carry_weight_gradients(facts)]
    parts += [random_part(one.program, Random(seed)) for seed in range(6)]
    plans = [plan_memory(part, facts.footprint) for part in parts]
    for plan in plans:
        assert plan.kept_bytes
        assert one.allocated_bytes(plan) <= plan.peak_bytes * 1.01
    ops = [op for _, op in issue_order(parts[0], plans[0].waits)]
    joined = replace(parts[0], lanes=(Lane(0, 0, tuple(ops)),))
    plan = plan_memory(joined, facts.footprint)
    assert one.allocated_bytes(plan) == pytest.approx(plan.peak_bytes, rel=0.05)


def test_keeps_the_limit() -> None:
    """Whatever the limit between the serial order's peak and that of no limit."""
    facts = measured()
    least = plan_memory(serial(facts.program), facts.footprint).peak_bytes
    most = beside_critical_path(facts).peak_bytes
    assert least < most
    for share in (0.0, 0.3, 0.7):
        limit = least + int(share * (most - least))
        plan = beside_critical_path(facts, limit)
        assert plan.peak_bytes <= limit
        assert trained().allocated_bytes(plan) <= limit * 1.01


def test_refuses_less_than_the_serial_order_needs() -> None:
    """The error names what would work, and that much does work."""
    model, make, example = model_of(WIDE), OPTIMIZERS["SGD"], batches_of(WIDE, 1)[0]
    with pytest.raises(FitError, match="serial order") as caught:
        hocket.compile_step(model, loss, make, example=example, memory_bytes=10**6)
    needed = caught.value.needed_bytes
    with hocket.compile_step(
        model, loss, make, example=example, memory_bytes=needed
    ) as step:
        assert all(one.peak_bytes <= needed for one in step.candidates)
        assert any(one.name == "serial" for one in step.candidates)
