"""Samples that are read by row, inputs and targets separately, with augmentation.

A sample in training depends on the seed, the epoch and its row alone: not on its batch,
nor on the worker that reads it. So each worker can read the rows and the side that it
needs, and all of them together see one batch.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd


class Samples(Protocol):
    """A data set: rows 0 to `num_samples - 1`, each with inputs and targets."""

    @property
    def num_samples(self) -> int:
        """The number of rows."""

    @property
    def fingerprint(self) -> int:
        """32 bits that depend on the content, so that workers notice different data."""

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """Return the model's arguments: a tensor, a tuple, or a dict of keywords.

        Args:
            rows: the rows: shape (B,), int64.
            draw: random numbers for augmentation; None returns samples as they are.
        """

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """Return the loss's targets, for the same rows and the same draw."""


@dataclass(frozen=True, slots=True)
class EpochRandom:
    """Random numbers of one epoch, for each row its own.

    Args:
        seed: the run's seed.
        epoch: the epoch, from 0.
    """

    seed: int
    epoch: int

    def uniform(self, rows: Tensor, num: int) -> Tensor:
        """Return numbers in [0, 1) per row, whatever the other rows.

        Args:
            rows: the rows: shape (B,).
            num: how many numbers per row.

        Returns:
            (B, num), float64.

        Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
        generators", OOPSLA 2014, figure 16), used as a hash of (seed, epoch, row, i).
        """
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64
            state = _mixed(np.array([self.seed], dtype=np.uint64))
            state = _mixed(state + np.uint64(self.epoch))
            state = _mixed(state + rows.numpy().astype(np.uint64))
            each = np.arange(num, dtype=np.uint64) * _STEP
            bits = _mixed(state[:, None] + each)
        return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's step and output function."""
    state = state + _STEP
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first rows of other samples: a small data set for a trial run.

    Args:
        samples: all of them.
        num_samples: how many rows to keep; at most as many as there are.
    """

    samples: Samples
    num_samples: int

    def __copy__(self) -> FirstSamples:
        """Copy the wrapped samples too: a copy may cache less than the original."""
        return replace(self, samples=copy(self.samples))

    @property
    def fingerprint(self) -> int:
        """The fingerprint of all samples."""
        return self.samples.fingerprint

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """See `Samples.inputs`."""
        return self.samples.inputs(rows, draw)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """See `Samples.targets`."""
        return self.samples.targets(rows, draw)


def first_samples(samples: Samples, num_samples: int | None) -> Samples:
    """Return at most so many samples, from the front; all of them for None."""
    if num_samples is None or num_samples >= samples.num_samples:
        return samples
    return FirstSamples(samples, num_samples)
