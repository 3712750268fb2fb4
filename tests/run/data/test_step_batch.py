"""A step's batches are cut into microbatches that weigh by their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.model.trace.example import Example
from hocket.run.cluster.layout import Layout
from hocket.run.data.step_batch import StepBatch, grouped, make_step_batches


def works_of(sizes: list[int], rank: int) -> list[StepBatch]:
    """Batches of these sizes, for two replicas with two microbatches each."""
    batches = [(torch.arange(n), torch.arange(n)) for n in sizes]
    example = Example.of((torch.arange(4),), {})
    return [
        batch["model"]
        for batch in make_step_batches(
            batches,
            7,
            Layout(rank, 1, 2),
            {"model": 2},
            example,
            torch.device("cpu"),
        )
    ]


def test_shares_add_up_to_one_over_all_batches_and_replicas() -> None:
    """By samples: a smaller batch weighs less, and never a mean of means."""
    sizes = [9, 9, 5]
    shares: dict[int, float] = {}
    for rank in (0, 1):
        for work in works_of(sizes, rank):
            own = {number + 2 * rank: x for number, x in work.shares().items()}
            assert not shares.keys() & own.keys()
            shares.update(own)
    assert sorted(shares) == list(range(12))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert [round(share * 23) for _, share in sorted(shares.items())] == [
        *(3, 2, 2, 2),
        *(3, 2, 2, 2),
        *(2, 1, 1, 1),
    ]


def test_only_the_last_batch_closes_the_step() -> None:
    """All are of one step, and differ in their first microbatch."""
    works = works_of([8, 8, 8], 1)
    assert [work.ends_step for work in works] == [False, False, True]
    assert [work.step.number for work in works] == [7, 7, 7]
    assert [work.step.first for work in works] == [0, 4, 8]
    assert {work.step.num_samples for work in works} == {24}


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (5, 2, [(0, 1), (2, 3), (4,)]),
        (2, 3, [(0, 1)]),
        (0, 2, []),
        (2, 1, [(0,), (1,)]),
    ],
)
def test_groups_end_with_what_is_left(
    count: int, size: int, expected: list[Any]
) -> None:
    """No batch is dropped."""
    assert list(grouped(range(count), size)) == expected
