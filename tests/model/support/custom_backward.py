"""A custom autograd function, which a graph of torch.export would lose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5
