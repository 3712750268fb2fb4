"""A tensor that crosses from one stage to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hocket.errors import ModelError


@dataclass(frozen=True, slots=True)
class SentTensor:
    """The name, shape and type of a tensor that is sent between stages.

    Args:
        name: the name, the same on both sides.
        shape: the shape with the example's number of samples.
        per_sample: how much each dimension grows with one more sample.
        num_samples: the example's number of samples.
        dtype: the type as captured; under autocast it may be another.
        requires_grad: whether a gradient comes back for it.
    """

    name: str
    shape: tuple[int, ...]
    per_sample: tuple[int, ...]
    num_samples: int
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """The bytes for the example's number of samples."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shape_for(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape for another number of samples.

        Raises:
            ModelError: the samples are part of no dimension in a simple way.
        """
        more = num_samples - self.num_samples
        pairs = zip(self.shape, self.per_sample, strict=True)
        shape = tuple(length + growth * more for length, growth in pairs)
        if min(shape, default=0) < 0:
            raise ModelError(
                f"{self.name} has the shape {self.shape} for {self.num_samples} "
                f"samples, but no shape is known for {num_samples}"
            )
        return shape
