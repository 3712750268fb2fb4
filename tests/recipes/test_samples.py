"""Batches: the same for everybody, each sample at most once per epoch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.recipes.samples import (
    Batch,
    evaluation_batches,
    num_batches,
    training_batches,
)

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples that say which row they are of."""

    num_samples: int

    def take(self, rows: Tensor) -> Batch:
        """The rows themselves, twice."""
        return rows, rows

    def take_varied(self, rows: Tensor, generator: torch.Generator) -> Batch:
        """The rows, and a random number for each."""
        return rows, torch.rand(len(rows), generator=generator)


@given(num_samples=sizes, batch_size=sizes, seed=seeds, epoch=st.integers(0, 100))
def test_training_takes_full_batches_of_different_samples(
    num_samples: int, batch_size: int, seed: int, epoch: int
) -> None:
    """As many full batches as there are, and no sample twice."""
    samples = Rows(num_samples)
    batches = list(training_batches(samples, batch_size, seed=seed, epoch=epoch))

    rows = [row for inputs, _ in batches for row in inputs.tolist()]
    assert len(batches) == num_batches(samples, batch_size) == num_samples // batch_size
    assert all(len(inputs) == batch_size for inputs, _ in batches)
    assert len(set(rows)) == len(rows)


@given(seed=seeds)
def test_an_epoch_follows_from_seed_and_number_alone(seed: int) -> None:
    """Every worker draws the same samples and variations; each epoch draws others."""

    def epoch(number: int) -> tuple[list[int], list[float]]:
        ((rows, noise),) = training_batches(Rows(30), 30, seed=seed, epoch=number)
        return rows.tolist(), noise.tolist()

    assert epoch(0) == epoch(0)
    assert epoch(0)[0] != epoch(1)[0]
    assert epoch(0)[1] != epoch(1)[1]


@given(num_samples=sizes, batch_size=sizes)
def test_evaluation_takes_every_sample_once(num_samples: int, batch_size: int) -> None:
    """In order, the last batch with what is left."""
    batches = list(evaluation_batches(Rows(num_samples), batch_size))
    rows = [row for inputs, _ in batches for row in inputs.tolist()]
    assert rows == list(range(num_samples))
    assert all(len(inputs) == batch_size for inputs, _ in batches[:-1])
