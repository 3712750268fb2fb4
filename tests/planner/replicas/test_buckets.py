"""The choice of buckets and k: beside exhaustive search, and beside known numbers."""

from __future__ import annotations

from functools import cache, partial
from random import Random
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.networks.single_convolutions import gpt_products, resnet_convolutions
from hocket.core.costs import Costs, Link
from hocket.errors import FitError
from hocket.planner.published.catalogue import CountedLayer
from hocket.planner.replicas.buckets import (
    BucketSearch,
    best_k,
    choose_buckets,
    golden_section,
)
from hocket.planner.stages import stage_costs
from hocket.planner.work import LayerCost, Weights

# Steps relative to computing alone, and the best k, of an event simulation of another
# author: F = I = W in proportion to the FLOPs, no input gradient of the first layer,
# one first-in-first-out link, each layer's gradient for itself.
# r is communication over computing; then (usual order with a barrier, reverse first-k).
KNOWN: Final = {
    ("resnet-50", 0.75): (1.084, 0.990, 29),
    ("resnet-50", 0.9): (1.234, 0.990, 40),
    ("resnet-50", 1.0): (1.334, 1.048, 46),
    ("resnet-101", 0.75): (1.083, 0.995, 35),
    ("resnet-101", 0.9): (1.233, 0.995, 76),
    ("resnet-101", 1.0): (1.333, 1.056, 88),
    # There the embedding's gradient does not wait for the W of the layer behind it.
    ("gpt", 0.25): (1.036, 1.000, 15),
    ("gpt", 0.5): (1.074, 1.000, 53),
    ("gpt", 0.75): (1.184, 1.127, 23),
    ("gpt", 1.0): (1.434, 1.293, 51),
}
NETWORKS: Final = {
    "resnet-50": resnet_convolutions(50),
    "resnet-101": resnet_convolutions(101),
    "gpt": gpt_products(),
}


def layer_by_layer(counted: tuple[CountedLayer, ...], r: float) -> BucketSearch:
    """Each layer a bucket; a step computes for one second."""
    flops = [sum(p.rows * p.inner * p.columns for p in x.products) for x in counted]
    layers = [
        LayerCost(
            x.name,
            own / sum(flops) / 3,
            own / sum(flops) / 3 if i else 0.0,
            own / sum(flops) / 3,
            weights=(Weights(x.name, x.weights, x.weights, 0),),
        )
        for i, (x, own) in enumerate(zip(counted, flops, strict=True))
    ]
    num_bytes = sum(x.weights for x in counted)
    return BucketSearch(
        layers,
        partial(stage_costs, layers, recomputes=False, update_s_per_byte=0.0),
        Costs((), reduce_link=Link(bytes_per_s=num_bytes / r)),
        num_replicas=2,
        given=tuple(range(1, len(layers))),
    )


@pytest.mark.parametrize(("network", "r"), KNOWN)
def test_finds_what_another_simulation_found(network: str, r: float) -> None:
    """DDP's step, and the step of the best k, which golden section finds, too."""
    usual, least, k = KNOWN[network, r]
    search = layer_by_layer(NETWORKS[network], r)
    boundaries = search.given
    assert boundaries is not None
    barrier = search.tried(boundaries, 0, barrier=True)
    off = 5e-3 if network == "gpt" else 1e-3
    assert barrier.step_s == pytest.approx(usual, abs=off)
    assert search.tried(boundaries, k).step_s == pytest.approx(least, abs=1e-3)
    assert best_k(search, boundaries).step_s == pytest.approx(least, abs=1e-3)


def test_neither_order_nor_overlap_helps_alone() -> None:
    """Without a barrier k = 0 gains nothing; with one, no k gains more than 1 %."""
    search = layer_by_layer(NETWORKS["resnet-50"], 0.9)
    boundaries = search.given
    assert boundaries is not None
    usual_s = search.tried(boundaries, 0, barrier=True).step_s
    assert search.tried(boundaries, 0).step_s == pytest.approx(usual_s)
    for k in (10, 20, 40):
        assert search.tried(boundaries, k, barrier=True).step_s > 0.99 * usual_s


def random_search(seed: int, memory_bytes: float = float("inf")) -> BucketSearch:
    """Layers of any times and sizes; every seed another model and link."""
    random = Random(seed)
    layers = []
    for number in range(random.randint(1, 40)):
        second = random.random() ** 2 * 1e-2
        num_bytes = round(random.random() ** 4 * 8e6)
        weights = (Weights(str(number), num_bytes, num_bytes, 0),)
        layers.append(
            LayerCost(
                str(number),
                second * random.uniform(0.7, 1.3),
                second * random.uniform(0.7, 1.3),
                second * random.uniform(0.7, 1.3),
                activation_bytes=random.randint(0, 10**6),
                weights=weights,
            )
        )
    total_s = 3 * sum(layer.forward_s for layer in layers)
    num_bytes = sum(layer.weights[0].num_bytes for layer in layers)
    r = random.choice([0.25, 0.5, 0.9, 1.0, 1.5])
    link = Link(random.choice([0.0, 1e-3 * total_s]), num_bytes / (r * total_s) + 1.0)
    make = partial(stage_costs, layers, recomputes=False, update_s_per_byte=1e-12)
    return BucketSearch(
        layers, cache(make), Costs((), reduce_link=link), 2, memory_bytes=memory_bytes
    )


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_is_as_fast_as_the_best_of_all(seed: int) -> None:
    """Within 2 % of every k for every size of bucket, and never slower than k = 0."""
    search = random_search(seed)
    found = choose_buckets(search)
    every = [
        search.tried(boundaries, k)
        for boundaries in search.cuts()
        for k in range(len(boundaries) + 2)
    ]
    assert found.step_s <= 1.02 * min(choice.step_s for choice in every)
    usual = [choice.step_s for choice in every if not choice.k]
    assert found.step_s <= min(usual) * (1 + 1e-6)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 1.0))
def test_keeps_to_the_memory(seed: int, share: float) -> None:
    """What is chosen fits; else the error names the memory that works."""
    free = random_search(seed)
    most = max(free.tried(cut, len(cut) + 1).peak_bytes for cut in free.cuts())
    least = min(free.tried(cut, 0).peak_bytes for cut in free.cuts())
    limit = round(0.9 * least + share * (most - 0.9 * least))
    needed = needed_bytes(random_search(seed, limit))
    assert needed <= limit or limit < least
    if needed > limit:
        assert needed_bytes(random_search(seed, needed)) <= needed


def needed_bytes(search: BucketSearch) -> int:
    """The peak of what is chosen; or, if nothing fits, what the error asks for."""
    try:
        return choose_buckets(search).peak_bytes
    except FitError as error:
        return error.needed_bytes


def test_a_shared_weight_limits_k() -> None:
    """Only the first of the buckets that share a weight may be among the first k."""
    search = random_search(3)
    tied = Weights("tied", 100, 100, 0)
    layers = list(search.layers)
    for number in (1, 5, 7):
        old = layers[number]
        layers[number] = LayerCost(old.name, 1.0, 1.0, 1.0, weights=(tied,))
    search = BucketSearch(layers, search.stages, search.costs, 2)
    assert search.most_k((2, 4, 6)) == 2
    assert search.most_k(()) == 1


@given(valley=st.integers(0, 200), high=st.integers(0, 200), plain=st.integers(0, 50))
def test_golden_section_finds_the_valley(valley: int, high: int, plain: int) -> None:
    """Also behind a plain; it asks for few of many numbers."""
    asked = set()

    def f(x: int) -> float:
        asked.add(x)
        return float(min(abs(x - valley), valley - min(plain, valley)))

    if valley <= high and valley - plain > high - valley:
        assert golden_section(f, 0, high) == valley
        assert len(asked) <= 26
