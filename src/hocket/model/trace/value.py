"""A tensor that crosses from one stage to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        order: see `order_of`.
    """

    name: str
    shape: tuple[int, ...]
    per_sample: tuple[int, ...]
    num_samples: int
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] = ()

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


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions by stride, the largest first.

    Returns:
        Nothing if they are in order, as in a contiguous tensor.
    """
    if tensor.is_contiguous():
        return ()
    strides = torch.empty_like(tensor, device="meta").stride()
    dims = range(tensor.dim())
    found = tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))
    return () if found == tuple(dims) else found


def ordered(memory: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return a view of memory in which a tensor's dimensions lie in an order.

    Args:
        memory: contiguous, with as many elements.
        shape: the tensor's shape.
        order: see `order_of`.
    """
    if not order:
        return memory.view(list(shape))
    in_memory = memory.view([shape[dim] for dim in order])
    return in_memory.permute([order.index(dim) for dim in range(len(order))])
