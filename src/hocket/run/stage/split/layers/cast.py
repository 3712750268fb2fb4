"""What autocast would turn a layer's operands into.

The operator would cast them by itself, but what W needs is the tensor that it read: the
short one, which is kept instead of the long one, and not beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a linear or convolution layer, as it will read them.

    Args:
        x: its input, of any shape.
        weight: already detached, where its gradient is put off.
        bias: likewise.
    """
    kind = "cpu" if x.is_cpu else x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    short_bias = None if bias is None else _short(bias, dtype)
    return _short(x, dtype), _short(weight, dtype), short_bias


def _short(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves float64 alone, and what is not a floating-point number."""
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_cast else tensor
