"""Casts a layer's operands as autocast would.

The operator would cast them by itself, but what W needs is the tensor that it read: the
cast one, which is kept instead of the original, and not beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a linear or convolution layer as the operator reads them.

    Args:
        x: the layer's input, of any shape.
        weight: the weight, detached if its gradient is deferred.
        bias: the bias, detached if its gradient is deferred.
    """
    kind = "cpu" if x.is_cpu else x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    short_bias = None if bias is None else _short(bias, dtype)
    return _short(x, dtype), _short(weight, dtype), short_bias


def _short(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor as autocast does; float64 and integers stay as they are."""
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_cast else tensor
