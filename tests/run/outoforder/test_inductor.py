"""Regions compiled by Inductor: orders stay exact, and eager mode is met closely."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Final

import pytest
import torch
from torch import nn

import hocket
from hocket.core.footprint import plan_memory
from hocket.core.op import Kind
from hocket.passes.serial import serial
from hocket.run.outoforder.capture.inductor import RegionCompiler, with_compiled
from hocket.run.outoforder.order.inductor import InductorWarning
from tests.run.outoforder.support.played_orders import (
    TrainedByHand,
    checked_device,
    free_device,
    random_order,
)
from tests.run.outoforder.support.small_steps import (
    OPTIMIZERS,
    TOLERANCE,
    Specimen,
    batches_of,
    difference,
    images,
    loss,
    model_of,
    train_compiled,
    train_eagerly,
    vectors,
)


def convolutional() -> nn.Module:
    """Convolutions with BatchNorm; with dropout, whose region is not compiled."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Hardswish(),
        nn.Conv2d(4, 4, 3),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def perceptron() -> nn.Module:
    """Linear layers with activations between them."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


CONVOLUTIONAL: Final = Specimen(convolutional, images)
PERCEPTRON: Final = Specimen(perceptron, vectors)


@cache
def trained() -> TrainedByHand:
    """The convolutional net, captured; all regions that can be are compiled."""
    one = TrainedByHand(
        model_of(CONVOLUTIONAL), OPTIMIZERS["AdamW"], batches_of(CONVOLUTIONAL, 3)
    )
    compiler = RegionCompiler(one.step)
    found = {place: compiler.compiled(place) for place in one.step.code.regions}
    regions = {place: region for place, region in found.items() if region is not None}
    assert {place.kind for place in regions} >= {Kind.FORWARD, Kind.BACKWARD_INPUT}
    one.step = replace(one.step, code=with_compiled(one.step.code, regions))
    return one


@pytest.mark.long
def test_random_orders_equal_their_serial_order() -> None:
    """Bit for bit, under checks of all accesses."""
    one = trained()
    expected = one.play(serial(one.program), free_device(1))
    for seed in range(3):
        order = random_order(one.program, Random(seed))
        found = one.play(order, checked_device(len(order.lanes), seed))
        assert all(torch.equal(found[x], expected[x]) for x in expected), seed


@pytest.mark.long
def test_takes_the_memory_that_is_predicted() -> None:
    """Within 5 %, by the allocator's own count."""
    one = trained()
    plan = plan_memory(serial(one.program), one.footprint())
    assert one.allocated_bytes(plan) == pytest.approx(plan.peak_bytes, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("specimen", [PERCEPTRON, CONVOLUTIONAL])
def test_equals_the_eager_step(
    monkeypatch: pytest.MonkeyPatch, specimen: Specimen
) -> None:
    """20 steps in float64, although it is not the fastest here."""
    monkeypatch.setattr("hocket.run.outoforder.order.inductor._LEAST_GAIN", -1e9)
    monkeypatch.setattr(
        "hocket.run.outoforder.captured_orders.faster_kernels",
        lambda chosen, device: len(chosen) - 1,
    )
    model, batches = model_of(specimen), batches_of(specimen)
    make = OPTIMIZERS["AdamW"]
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(
        model, loss, make, example=batches[0], inductor=True
    ) as step:
        losses = train_compiled(step, batches)
        assert step.candidates[0].kernels == "inductor"
        assert ("serial", "plain") in {(x.name, x.kernels) for x in step.candidates}
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert difference(model, trained) <= TOLERANCE


def test_without_a_compiler_it_says_so_and_stays_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One warning, with the way out, and not one for each region."""
    from torch._inductor.exc import InvalidCxxCompiler

    def missing(*_: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr("hocket.run.outoforder.capture.inductor._lowered", missing)
    model, example = model_of(PERCEPTRON), batches_of(PERCEPTRON, 1)[0]
    with pytest.warns(InductorWarning, match="install g") as caught:
        step = hocket.compile_step(
            model, loss, OPTIMIZERS["SGD"], example=example, inductor=True
        )
    with step:
        assert {one.kernels for one in step.candidates} == {"plain"}
    assert [one.category for one in caught].count(InductorWarning) == 1
