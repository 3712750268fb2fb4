"""A data source of ready batches' samples, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.run.data.samples import EpochRandom


@dataclass(frozen=True)
class ConcatenatedBatches:
    """The samples of all batches.

    Args:
        batches: pairs of inputs and targets.
    """

    batches: Sequence[tuple[Tensor, Tensor]]
    fingerprint: int = 1

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return sum(len(targets) for _, targets in self.batches)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Return the inputs of these samples."""
        return torch.cat([inputs for inputs, _ in self.batches])[rows]

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Return the targets of these samples."""
        return torch.cat([targets for _, targets in self.batches])[rows]
