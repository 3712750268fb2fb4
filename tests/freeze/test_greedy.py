"""PipeTransformer's partitions and pipeline lengths, as its code makes them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from hocket.errors import ShapeError
from hocket.freeze.policy import num_frozen_after
from hocket.freeze.shapes import (
    Frozen,
    PipelineShape,
    greedy,
    greedy_boundaries,
    halved,
    halved_shape,
    largest_part,
)
from hocket.planner.balance import Balancer
from hocket.planner.work import LayerCost


def units(embedding: int, hidden: int, num_layers: int, head: list[int]) -> list[float]:
    """Millions of parameters: embedding, attention and MLP of each layer, end."""
    attention = 4 * hidden * (hidden + 1) + 2 * hidden
    mlp = 8 * hidden * hidden + 5 * hidden + 2 * hidden
    return [x / 1e6 for x in (embedding, *(attention, mlp) * num_layers, *head)]


VIT_EMBEDDING = 768 * (3 * 16 * 16 + 1) + 198 * 768


def vit(num_classes: int) -> list[float]:
    """ViT-B/16."""
    return units(VIT_EMBEDDING, 768, 12, [2 * 768, 769 * num_classes])


def bert(hidden: int, num_layers: int) -> list[float]:
    """BERT with the head for spans."""
    embedding = (30522 + 512 + 2 + 2) * hidden
    return units(embedding, hidden, num_layers, [2 * (hidden + 1)])


def test_vit_on_8_devices_equals_the_authors_partition() -> None:
    """Counts and millions of parameters, to the last digit of a user's log."""
    sizes = vit(100)
    counts = greedy(sizes, 8)
    assert counts == [4, 2, 3, 3, 3, 3, 4, 5]
    edges = [0, *accumulate(counts)]
    parts = [round(sum(sizes[a:b]), 6) for a, b in pairwise(edges)]
    assert parts == [
        10.194432,
        7.087872,
        11.81184,
        9.451776,
        11.81184,
        9.451776,
        14.175744,
        11.890276,
    ]


def test_vit_on_4_devices_equals_the_authors_partition() -> None:
    """With 1000 classes."""
    sizes = vit(1000)
    counts = greedy(sizes, 4)
    assert counts == [7, 6, 6, 8]
    edges = [0, *accumulate(counts)]
    parts = [round(sum(sizes[a:b]), 3) for a, b in pairwise(edges)]
    assert parts == [22.006, 21.264, 21.264, 22.034]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (vit(1000), [8] * 4 + [4] * 4 + [2] * 2 + [1] * 2),
        (bert(768, 12), [4] * 5 + [2] * 3 + [1] * 4),
        (bert(1024, 24), [8] * 8 + [4] * 8 + [2] * 4 + [1] * 4),
    ],
)
def test_pipeline_lengths(sizes: list[float], expected: list[int]) -> None:
    """After 1, 2, 3, ... frozen layers of a pipeline that began with 8 devices."""
    most, num_devices, found = largest_part(sizes, 8), 8, []
    for num_frozen in range(1, len(expected) + 1):
        num_devices = halved(sizes[1 + 2 * num_frozen :], num_devices, most)
        found.append(num_devices)
    assert found == expected


def test_the_published_run_goes_through_8_4_2_1() -> None:
    """ViT-B/16 on ImageNet with alpha 1/3: the figure's steps at epochs 2, 3 and 5."""
    sizes, num_devices, found = vit(1000), 8, []
    most = largest_part(sizes, 8)
    for epoch in range(7):
        num_frozen = num_frozen_after(1 / 3, 12, epoch)
        rest = sizes[1 + 2 * num_frozen :] if num_frozen else sizes
        num_devices = halved(rest, num_devices, most)
        found.append(num_devices)
    assert found == [8, 8, 4, 2, 2, 1, 1]


def test_the_exact_cut_halves_one_layer_later() -> None:
    """The greedy cut's largest part is larger, and what must fit it with it."""

    def exact(sizes: list[float], num_devices: int) -> float:
        cut = Balancer(sizes, [0.0] * (len(sizes) - 1)).cut(num_devices)
        edges = (0, *cut, len(sizes))
        return max(sum(sizes[a:b]) for a, b in pairwise(edges))

    sizes = vit(100)
    assert round(exact(sizes, 8), 2) == 11.89
    assert round(largest_part(sizes, 8), 2) == 14.18
    for largest, first in ((largest_part, 5), (exact, 6)):
        most = largest(sizes, 8)
        fits = [largest(sizes[1 + 2 * n :], 4) <= most for n in range(1, 8)]
        assert fits.index(True) + 1 == first


def test_a_frozen_part_counts_for_a_sixth() -> None:
    """The first device takes less of the rest."""
    sizes = [1.0] * 12
    assert greedy(sizes, 3) == [3, 4, 5]
    assert greedy(sizes, 3, frozen_size=12.0) == [1, 5, 6]
    assert greedy_boundaries([6.0, 6.0, *sizes], 3, num_frozen=2) == (3, 8)


def test_a_run_is_cut_and_halved_by_this_rule() -> None:
    """The authors' partition at first, and their pipeline lengths as layers freeze."""
    sizes = vit(1000)
    costs = [LayerCost(str(i), 1.0, 1.0, 1.0) for i in range(len(sizes))]
    assert Frozen(costs, 0, sizes=sizes).boundaries(4) == (7, 13, 19)
    shape = first = PipelineShape(8, 1)
    found, with_two_parts = [], []
    for num_frozen in range(1, 13):
        model = Frozen(costs, 1 + 2 * num_frozen, sizes=sizes)
        shape = halved_shape(model, shape, first, num_parts=16)
        found.append(shape.num_stages)
        with_two_parts.append(halved_shape(model, first, first, num_parts=2))
    assert found == [8] * 4 + [4] * 4 + [2] * 2 + [1] * 2
    assert {*with_two_parts} == {first, PipelineShape(4, 2)}


@pytest.mark.parametrize(
    ("first", "num_parts", "expected"),
    [
        ((5, 1), 5, {2: "5x1", 6: "5x1", 8: "1x5"}),
        ((6, 1), 6, {2: "6x1", 6: "3x2", 9: "1x6"}),
        ((3, 2), 4, {2: "3x2", 6: "3x2", 9: "3x2"}),
    ],
)
def test_all_workers_work_in_a_halved_shape(
    first: tuple[int, int], num_parts: int, expected: dict[int, str]
) -> None:
    """Past bug: five stages became 2x2, of four workers, and 3x2 became 4x1."""
    costs = [LayerCost(str(i), 1.0, 1.0, 1.0) for i in range(10)]
    shape = PipelineShape(*first)
    for num_frozen, text in expected.items():
        model = Frozen(costs, num_frozen, sizes=[1.0] * 10)
        assert str(halved_shape(model, shape, shape, num_parts)) == text


def test_each_stage_gets_a_layer() -> None:
    """Where there are as many; a large first or last layer takes no stage away."""
    assert greedy([9.0, 1.0, 1.0], 3) == [0, 3, 0]
    assert greedy_boundaries([9.0, 1.0, 1.0], 3) == (1, 2)
    assert greedy_boundaries([1.0, 1.0, 9.0], 3) == (1, 2)
    with pytest.raises(
        ShapeError, match="1 layers of 3 are left to train, fewer than 2"
    ):
        greedy_boundaries([9.0, 1.0, 1.0], 2, num_frozen=2)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("num_frozen", range(6))
def test_the_exact_cut_is_never_worse(num_devices: int, num_frozen: int) -> None:
    """Its largest part is at most the greedy one's."""
    sizes = vit(100)[2 * num_frozen + 1 :]
    cut = Balancer(sizes, [0.0] * (len(sizes) - 1)).cut(num_devices)
    edges = (0, *cut, len(sizes))
    exact = max(sum(sizes[a:b]) for a, b in pairwise(edges))
    assert exact <= largest_part(sizes, num_devices) + 1e-12
