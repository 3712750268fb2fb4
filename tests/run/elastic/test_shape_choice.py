"""Which shapes are chosen, and what is said where none fits the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.errors import FitError
from hocket.freeze import Plasticity
from hocket.freeze.shapes import Frozen, PipelineShape, Prediction, order_of, predict
from hocket.run.elastic.shape_choice import FreezingOptions, Present, ShapeChoice
from tests.freeze.test_shapes import layers

NUM_LAYERS, NUM_PARTS = 10, 4
SHAPES = (PipelineShape(4, 1), PipelineShape(2, 2), PipelineShape(1, 4))
EXACT = Frozen(layers([1.0] * NUM_LAYERS), 0)
GREEDY = replace(EXACT, sizes=[1.0] * NUM_LAYERS)


def needs(num_frozen: int) -> dict[str, Prediction]:
    """What each shape of four workers needs that there are layers for."""
    model = replace(EXACT, num_frozen=num_frozen)
    shapes = [x for x in SHAPES if x.num_stages <= NUM_LAYERS - num_frozen]
    return {str(x): predict(model, x, NUM_PARTS, "gpipe") for x in shapes}


def choose(
    model: Frozen = EXACT,
    shapes: Mapping[int, tuple[int, int]] | None = None,
    memory_bytes: int | None = None,
) -> tuple[ShapeChoice, Present]:
    """What chooses for four workers, none of whose layers is frozen yet."""
    options = FreezingOptions(Plasticity(), shapes, memory_bytes)
    played = play(model, SHAPES[0])
    return make_choice(options, model, played), Present(SHAPES[0], (), 0)


def play(model: Frozen, first: PipelineShape) -> Any:
    """What workers of a first layout play, as far as a choice looks at it."""
    boundaries = model.boundaries(first.num_stages)
    order = order_of("gpipe", first, NUM_PARTS)
    plan = SimpleNamespace(
        boundaries=boundaries,
        costs=Costs(()),
        schedule=order,
        predicted=simulate(order, model.costs(boundaries)),
    )
    layout = SimpleNamespace(
        num_devices=first.num_stages, num_replicas=first.num_replicas
    )
    return SimpleNamespace(plan=plan, layout=layout)


def make_choice(options: FreezingOptions, model: Frozen, played: Any) -> ShapeChoice:
    """The choice of four workers."""
    balance = "exact" if model.sizes is None else "greedy"
    job = SimpleNamespace(
        schedule="gpipe", num_parts=NUM_PARTS, balance=balance, recut=True
    )
    reshaper: Any = SimpleNamespace(
        job=job, costs_of=lambda num: replace(model, num_frozen=num)
    )
    return ShapeChoice(options, range(NUM_LAYERS), reshaper, played, num_workers=4)


def test_a_greedy_pipeline_becomes_longer_again() -> None:
    """The first layout's stages are halved then, not the present ones."""
    choice, present = choose(GREEDY)
    found = []
    for num_frozen in (2, 8, 0, 8, 5, 8):
        shape = choice.shape(num_frozen, present).shape
        found.append(str(shape))
        present = Present(shape, (), num_frozen)
    assert found == ["4x1", "1x4", "4x1", "1x4", "2x2", "1x4"]


def test_shapes_may_be_numpy_integers() -> None:
    """Past bug: rank 0 could not send them to the others when layers froze."""
    shapes: Any = {8: tuple(np.array([1, 4]))}
    choice, present = choose(shapes=shapes)
    found = choice.shape(8, present).shape
    assert found == (1, 4)
    assert all(type(number) is int for number in found)


@pytest.mark.parametrize(
    ("num_frozen", "boundaries"), [(0, (1, 2, 3)), (1, (1, 2, 3, 4))]
)
def test_a_layout_that_stays_is_predicted_as_it_is_cut(
    num_frozen: int, boundaries: tuple[int, ...]
) -> None:
    """Past bug: as if it were cut again, and so might need less than it did.

    Most layers are on the last device. With another number of frozen layers, it is cut.
    """
    choice, _ = choose(shapes={})
    present = Present(SHAPES[0], boundaries, num_frozen)
    found = choice.shape(num_frozen, present)
    assert (found.boundaries, found.fullest) == (boundaries, 3)
    assert found in choice.possible(num_frozen, present)
    assert found.peak_bytes > 2 * choice.shape(num_frozen + 1, present).peak_bytes


@pytest.mark.parametrize(
    ("model", "shapes"),
    [(GREEDY, None), (EXACT, {0: (4, 1), 8: (1, 4)})],
)
def test_a_refusal_names_the_least_of_all_shapes(
    model: Frozen, shapes: dict[int, tuple[int, int]] | None
) -> None:
    """Past bug: the only shape that was asked for was said to need the least of all."""
    known = needs(8)
    asked = known["1x4"]
    least = min(known.values(), key=lambda x: x.peak_bytes)
    most = asked.peak_bytes - 1
    assert least.shape != asked.shape
    choice, present = choose(model, shapes, most)
    with pytest.raises(FitError) as error:
        choice.shape(8, present)
    assert str(error.value).startswith(
        f"with 8 layers frozen, 1x4 (stages x replicas) needs {asked.peak_bytes} bytes "
        f"on device 0, and memory_bytes is {most}; of all shapes, {least.shape} needs "
        f"the least, {least.peak_bytes} bytes"
    )
    found = error.value.needed_bytes, error.value.memory_bytes, error.value.device
    assert found == (asked.peak_bytes, most, 0)


def test_takes_the_shapes_that_fit() -> None:
    """However fast others are; if none fits, the one that needs the least is named."""
    known = needs(4)
    least = min(known.values(), key=lambda x: x.peak_bytes)
    others = [x.peak_bytes for x in known.values() if x.shape != least.shape]
    fastest = min(known.values(), key=lambda x: x.step_s)
    assert fastest.shape != least.shape
    for most, expected in ((None, fastest), (min(others) - 1, least)):
        choice, present = choose(memory_bytes=most)
        present = replace(present, boundaries=(2, 4, 6), steps_left=10**9)
        assert choice.shape(4, present).shape == expected.shape
    choice, present = choose(memory_bytes=least.peak_bytes - 1)
    text = f"with 4 layers frozen, no shape fits memory_bytes {least.peak_bytes - 1}: "
    with pytest.raises(FitError) as error:
        choice.shape(4, present)
    assert str(error.value).startswith(
        f"{text}{least.shape} (stages x replicas) needs the least, {least.peak_bytes} "
        f"bytes on device {least.fullest}"
    )
