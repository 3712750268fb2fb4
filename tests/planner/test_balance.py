"""Balancing is exact: no cut has a faster slowest stage, with its messages."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.planner.balance import Balancer
from hocket.planner.stages import stage_costs
from hocket.planner.work import LayerCost
from hocket.schedules import make_schedule

seconds = st.integers(0, 9).map(float)


def stages(
    layer_s: list[float], boundaries: tuple[int, ...], message_s: list[float]
) -> list[float]:
    """Seconds of each stage; the boundary before layer i has `message_s[i - 1]`."""
    edges = (0, *boundaries, len(layer_s))
    least_s = min(message_s, default=0.0)
    half_s = {i: (message_s[i - 1] - least_s) / 2 for i in boundaries}
    return [
        sum(layer_s[a:b]) + half_s.get(a, 0.0) + half_s.get(b, 0.0)
        for a, b in pairwise(edges)
    ]


@given(st.lists(seconds, min_size=1, max_size=8), st.data())
def test_no_cut_is_better(layer_s: list[float], data: st.DataObject) -> None:
    """Beside every cut there is, with messages of any sizes."""
    count = len(layer_s)
    num_stages = data.draw(st.integers(1, count))
    message_s = data.draw(st.lists(seconds, min_size=count - 1, max_size=count - 1))
    found = stages(layer_s, Balancer(layer_s, message_s).cut(num_stages), message_s)

    others = [
        stages(layer_s, cuts, message_s)
        for cuts in combinations(range(1, count), num_stages - 1)
    ]
    assert len(found) == num_stages
    assert max(found) == min(max(other) for other in others)
    equal = [other for other in others if max(other) == max(found)]
    assert sum(x * x for x in found) == min(sum(x * x for x in o) for o in equal)


@given(st.lists(seconds, min_size=1, max_size=8), st.data())
def test_no_cut_is_better_where_devices_differ(
    layer_s: list[float], data: st.DataObject
) -> None:
    """Beside every cut: each stage takes as much longer as its device does."""
    count = len(layer_s)
    num_stages = data.draw(st.integers(1, count))
    message_s = data.draw(st.lists(seconds, min_size=count - 1, max_size=count - 1))
    factors = st.sampled_from([0.5, 1.0, 2.0])
    slowness = data.draw(st.lists(factors, min_size=num_stages, max_size=num_stages))

    def longest_s(cuts: tuple[int, ...]) -> float:
        own_s = stages(layer_s, cuts, message_s)
        return max(s * factor for s, factor in zip(own_s, slowness, strict=True))

    found = Balancer(layer_s, message_s).cut(num_stages, slowness)

    assert len(found) == num_stages - 1
    all_cuts = combinations(range(1, count), num_stages - 1)
    assert longest_s(found) == min(map(longest_s, all_cuts))


def test_equal_layers_make_equal_stages() -> None:
    """Eight layers on four devices."""
    assert Balancer([1.0] * 8, [0.0] * 7).cut(4) == (2, 4, 6)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=8), st.floats(0, 9), st.data())
def test_messages_that_are_all_as_long_change_no_cut(
    layer_s: list[float], message_s: float, data: st.DataObject
) -> None:
    """To the last bit: every cut has as many boundaries."""
    num_stages = data.draw(st.integers(1, len(layer_s)))
    without, equal = (
        Balancer(layer_s, [each_s] * (len(layer_s) - 1)).cut(num_stages)
        for each_s in (0.0, message_s)
    )
    assert equal == without


def test_a_wide_boundary_is_left_out_where_its_messages_cost_more() -> None:
    """The picture in `balance.py`; with fast links the stages are more alike."""
    wide = [1, 1, 6, 1, 1]
    layers = [
        LayerCost("", own_s, 0.0, 0.0, received_bytes=num_bytes)
        for own_s, num_bytes in zip([3, 1, 4, 1, 5, 9], [0, *wide], strict=True)
    ]

    assert Balancer.of(layers, Link(bytes_per_s=1.0)).cut(3) == (4, 5)
    assert Balancer.of(layers, Link(bytes_per_s=1e9)).cut(3) == (3, 5)


def test_simulated_steps_are_shorter_where_messages_are_slow() -> None:
    """1F1B over random chains whose widest boundaries carry four times the narrowest.

    A message over the narrowest takes two fifths of a mean layer's time. Single steps
    may be longer: all together are shorter by more than a twentieth.
    """
    order = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    fast, slow = Link(), Link(bytes_per_s=2.5)
    random, steps_s = Random(0), {fast: 0.0, slow: 0.0}
    for _ in range(24):
        layers = [_layer(random.uniform(0.3, 1.7), random) for _ in range(10)]
        for known in steps_s:
            boundaries = Balancer.of(layers, known).cut(4)
            stages = stage_costs(
                layers, boundaries, recomputes=False, update_s_per_byte=0.0
            )
            steps_s[known] += simulate(order, Costs(stages, link=slow)).makespan_s

    assert steps_s[slow] < 0.95 * steps_s[fast]


def _layer(own_s: float, random: Random) -> LayerCost:
    num_bytes = random.choice((1, 1, 1, 2, 4))
    return LayerCost(
        "",
        own_s / 3,
        own_s / 3,
        own_s / 3,
        received_bytes=num_bytes,
        received_grad_bytes=num_bytes,
    )


def test_too_few_layers_name_the_numbers() -> None:
    """Three stages need three layers."""
    with pytest.raises(ShapeError, match="2 layers cannot be cut into 3 stages"):
        Balancer([1.0, 2.0], [0.0]).cut(3)
