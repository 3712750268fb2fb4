"""Regions compiled by Inductor: orders stay exact, and eager mode is met closely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx, nn

import hocket
from hocket.core.footprint import plan_memory
from hocket.core.op import Kind
from hocket.passes.serial import serial
from hocket.run.outoforder.capture.inductor import (
    CompiledRegion,
    RegionCompiler,
    with_compiled,
)
from hocket.run.outoforder.capture.regions import RegionKey
from hocket.run.outoforder.order.inductor import InductorWarning, with_inductor
from tests.run.outoforder.support.inline_device import InlineDevice
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


def eager(
    module: fx.GraphModule, values: object
) -> Callable[[list[Tensor]], Sequence[Any]]:
    """Take the operators for what Inductor would make of them."""

    def run(inputs: list[Tensor]) -> Sequence[Any]:
        made: Sequence[Any] = module(*inputs)
        inputs.clear()
        return made

    return run


def test_a_region_that_updates_a_buffer_wrongly_stays_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its outputs are right, but BatchNorm's variance becomes the mean."""
    one = TrainedByHand(
        model_of(CONVOLUTIONAL), OPTIMIZERS["SGD"], batches_of(CONVOLUTIONAL, 2)
    )
    compiled, tried, wrong = RegionCompiler.compiled, set[RegionKey](), set[RegionKey]()

    def with_wrong_buffers(
        compiler: RegionCompiler, place: RegionKey
    ) -> CompiledRegion | None:
        region = compiled(compiler, place)
        if region is None:
            return None
        tried.add(place)
        if not region.assigned:
            return region
        wrong.add(place)
        *views, mean, variance = region.views
        variance = replace(variance, source=mean.source)
        return replace(region, views=(*views, mean, variance))

    monkeypatch.setattr(RegionCompiler, "compiled", with_wrong_buffers)
    monkeypatch.setattr("hocket.run.outoforder.capture.inductor._lowered", eager)
    monkeypatch.setattr("hocket.run.outoforder.order.inductor._LEAST_GAIN", -1e9)
    with pytest.warns(InductorWarning, match="computes something else"):
        step = with_inductor(one.step, one.given, InlineDevice(1))
    assert step is not None
    plain = one.step.code.regions
    assert wrong
    assert tried - wrong == {x for x in plain if step.code.regions[x] != plain[x]}


def test_says_how_many_regions_there_was_no_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here for none; updates are never compiled, and do not count."""
    one = TrainedByHand(
        model_of(PERCEPTRON), OPTIMIZERS["SGD"], batches_of(PERCEPTRON, 2)
    )
    monkeypatch.setattr("hocket.run.outoforder.order.inductor._MOST_S", -1.0)
    num = sum(place.kind is not Kind.UPDATE for place in one.step.code.regions)
    with pytest.warns(InductorWarning, match=f"^{num} regions were not tried"):
        assert with_inductor(one.step, one.given, InlineDevice(1)) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, hocket.HocketError])
def test_errors_that_are_not_the_compilers_are_raised(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """They would come again, and a warning would hide them."""
    one = TrainedByHand(
        model_of(PERCEPTRON), OPTIMIZERS["SGD"], batches_of(PERCEPTRON, 2)
    )

    def failing(*_: object) -> None:
        raise error("no")

    monkeypatch.setattr("hocket.run.outoforder.capture.inductor._lowered", failing)
    with pytest.raises(error, match="no"):
        with_inductor(one.step, one.given, InlineDevice(1))
