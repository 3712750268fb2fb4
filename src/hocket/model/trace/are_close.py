"""Compares the results of two runs of the same code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def are_close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Return whether tensors differ by no more than rounding.

    Some GPU kernels add up in another order each time. Rounding is relative to the
    largest element of each tensor.
    """
    if len(a) != len(b):
        return False
    return all(_is_close(x, y) for x, y in zip(a, b, strict=True))


def _is_close(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.detach().to_dense(), y.detach().to_dense()
    if torch.equal(x, y):
        return True
    if not (x.is_floating_point() or x.is_complex()):
        return False
    least = math.sqrt(torch.finfo(x.dtype).eps)
    largest = x.abs().nan_to_num().max().item()
    return torch.allclose(x, y, least, least * largest, equal_nan=True)
