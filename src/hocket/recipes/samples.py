"""Samples in an order that everybody agrees on: batches of one epoch.

Every worker of a pipeline goes through the same batches, in the same order, and takes
its microbatches from them. So an epoch's order depends on the seed and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Samples(Protocol):
    """Something that can be indexed by many rows at once."""

    @property
    def num_samples(self) -> int:
        """How many there are."""

    def take(self, rows: Tensor) -> Batch:
        """The samples of these rows, as they are."""

    def take_varied(self, rows: Tensor, generator: torch.Generator) -> Batch:
        """The same for training, augmented where the data allow it."""


def training_batches(
    samples: Samples, batch_size: int, *, seed: int, epoch: int
) -> Iterator[Batch]:
    """Full batches of one epoch, shuffled; what is left waits for another epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(samples.num_samples, generator=generator)
    for begin in range(0, num_batches(samples, batch_size) * batch_size, batch_size):
        yield samples.take_varied(order[begin : begin + batch_size], generator)


def evaluation_batches(samples: Samples, batch_size: int) -> Iterator[Batch]:
    """Every sample once, in order; the last batch may be smaller."""
    for rows in torch.arange(samples.num_samples).split(batch_size):
        yield samples.take(rows)


def num_batches(samples: Samples, batch_size: int) -> int:
    """Full batches in one epoch of training."""
    return samples.num_samples // batch_size
