"""The cut behind a frozen part, and which shape is worth a transition."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs, Link
from hocket.errors import ShapeError
from hocket.freeze.cache.payoff import CacheCosts
from hocket.freeze.shapes import (
    Frozen,
    PipelineShape,
    Prediction,
    next_shape,
    order_of,
    possible,
    predict,
    shapes_of,
    with_frozen_layers,
)
from hocket.planner.work import LayerCost, Weights


def layers(seconds: list[float], weight_bytes: int = 10) -> list[LayerCost]:
    """Layers whose backward takes twice their forward, each with its own weights."""
    return [
        LayerCost(
            f"layer {i}",
            s,
            s,
            s,
            activation_bytes=1,
            weights=(Weights(f"w{i}", weight_bytes, weight_bytes, 2 * weight_bytes),),
        )
        for i, s in enumerate(seconds)
    ]


def test_the_first_device_runs_the_frozen_forwards_too() -> None:
    """By hand, with layers that take 1 s frozen and 3 s trained."""
    assert Frozen(layers([1.0] * 8), 3).boundaries(1) == (3,)
    assert Frozen(layers([1.0] * 8), 3).boundaries(2) == (3, 5)  # 3 + 6 beside 9
    assert Frozen(layers([1.0] * 8), 4).boundaries(2) == (4, 5)  # 4 + 3 beside 9


@pytest.mark.parametrize("num_frozen", [0, 1, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_slowest_device_is_the_fastest_possible(
    num_frozen: int, num_stages: int
) -> None:
    """Against all cuts."""
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    model = Frozen(layers(seconds), num_frozen)

    def slowest(begins: tuple[int, ...]) -> float:
        edges = (num_frozen, *begins, len(seconds))
        parts = [3 * sum(seconds[a:b]) for a, b in pairwise(edges)]
        return max(parts[0] + sum(seconds[:num_frozen]), *parts[1:], 0.0)

    found = model.boundaries(num_stages)
    found = found[1:] if num_frozen else found
    cuts = combinations(range(num_frozen + 1, len(seconds)), num_stages - 1)
    assert slowest(found) == min(map(slowest, cuts))


def test_there_must_be_layers_for_all_stages() -> None:
    """Shapes with more stages than layers left are not possible."""
    model = Frozen(layers([1.0] * 6), 3)
    with pytest.raises(ShapeError, match="3 layers cannot be cut into 4 stages"):
        model.boundaries(4)
    shapes = [x.shape for x in possible(model, 4, 4, "1f1b")]
    assert shapes == [PipelineShape(2, 2), PipelineShape(1, 4)]


def test_shapes_divide_workers_and_microbatches() -> None:
    """Any divisors, not only powers of two."""
    assert shapes_of(6, 12) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert shapes_of(4, 6) == [(4, 1), (2, 2)]


def test_predictions_in_closed_form() -> None:
    """GPipe with equal stages: (M + K - 1) times a microbatch's share of a device.

    4 layers of 3 s left behind 2 frozen ones of 1 s each, with 8 microbatches in all.
    """
    model = Frozen(layers([1.0] * 6), 2)
    alone = predict(model, PipelineShape(1, 1), 8, "gpipe")
    assert alone.step_s == 8 * (2 + 4 * 3.0)
    assert predict(model, PipelineShape(1, 4), 8, "gpipe").step_s == 2 * (2 + 4 * 3.0)
    plain = replace(model, frozen_s=[0.75] * 6)  # without dropout, and for no backward
    for priced, prefix_s in (
        (plain, 1.5),
        (replace(plain, cache=CacheCosts(2, 0.5, 0.25)), 0.5),
        (replace(plain, cache=CacheCosts(1, 0.5, 0.25)), 0.5 + 0.75 + 0.25),
    ):
        found = predict(priced, PipelineShape(1, 1), 8, "gpipe")
        assert found.step_s == 8 * (prefix_s + 4 * 3.0)
        assert found.prefix_s == prefix_s
        assert priced.costs(found.boundaries, 9.0).stages[0].forward_s == 9.0
    # Frozen: weights alone. Trained: weights, gradients and state.
    assert alone.peak_bytes >= 2 * 10 + 4 * 40
    whole = predict(Frozen(layers([1.0] * 6), 0), PipelineShape(1, 1), 8, "gpipe")
    assert whole.peak_bytes - alone.peak_bytes >= 2 * 30


def test_a_cache_that_was_not_measured_takes_as_long_as_messages() -> None:
    """Four bytes at half a byte a second, to read and to store."""
    received = [replace(x, received_bytes=4) for x in layers([1.0] * 6)]
    model = Frozen(received, 2, beside=Costs((), link=Link(bytes_per_s=0.5)))
    assert model.unmeasured_cache == CacheCosts(2, 8.0, 8.0)


def test_layers_stay_where_they_are() -> None:
    """By hand, on three devices: a b │ c d │ e f, of which the first n are frozen.

    A stage that is frozen in part is two stages on one device; a frozen one has
    forwards alone, and keeps nothing. With GPipe, the first trained device waits for
    the frozen ones before it, and then the slowest device is the last.
    """
    seconds = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    for num_frozen, boundaries, devices in (
        (0, (2, 4), [0, 1, 2]),
        (1, (1, 2, 4), [0, 0, 1, 2]),
        (2, (2, 4), [0, 1, 2]),
        (3, (2, 3, 4), [0, 1, 1, 2]),
        (5, (2, 4, 5), [0, 1, 2, 2]),
    ):
        model = Frozen(layers(seconds), num_frozen, kept=(2, 4))
        assert model.boundaries(3) == boundaries
        order = order_of("gpipe", PipelineShape(3, 1), 4)
        order = with_frozen_layers(order, boundaries, num_frozen)
        check(order)
        stages = order.program.stages
        assert [x.device for x in stages] == devices
        edges = (0, *boundaries, len(seconds))
        assert [x.trainable for x in stages] == [x >= num_frozen for x in edges[:-1]]
        assert model.layers_on(boundaries, 3) == (range(2), range(2, 4), range(4, 6))
        costs = model.costs(boundaries).stages
        for (a, b), cost in zip(pairwise(edges), costs, strict=True):
            assert cost.forward_s == sum(seconds[a:b])
            backward_s = cost.input_grad_s + cost.weight_grad_s
            assert backward_s == (2 * sum(seconds[a:b]) if a >= num_frozen else 0.0)
            assert (cost.optimizer_bytes > 0) == (a >= num_frozen)
    found = predict(
        Frozen(layers(seconds), 4, kept=(2, 4)), PipelineShape(3, 1), 4, "gpipe"
    )
    assert found.step_s == 2 * 3.0 + 4 * 9.0


def test_takes_a_shape_only_if_it_saves_more_than_the_transition() -> None:
    """A step takes 1 s less: 5 s of transition are worth it from 6 steps on."""
    slow = Prediction(PipelineShape(2, 1), (3,), 3.0, 10)
    fast = Prediction(PipelineShape(1, 2), (), 2.0, 20)
    for steps_left, expected in ((4, slow), (5, slow), (6, fast)):
        found = next_shape(
            slow.shape,
            [slow, fast],
            steps_left=steps_left,
            transition_s=lambda x: 5.0 * (x is fast),
        )
        assert found is expected
