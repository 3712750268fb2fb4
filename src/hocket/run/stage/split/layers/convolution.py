"""Convolutions over one to three dimensions, grouped or not, and transposed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.run.stage.split.layers.call import (
    DeferredCall,
    Pair,
    defers,
    detached_weight,
)
from hocket.run.stage.split.layers.cast import cast
from hocket.run.stage.split.layers.deferral import Deferral, Routed

Sizes: TypeAlias = int | Sequence[int]

_PLAIN: Final = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED: Final = {
    1: torch.conv_transpose1d,
    2: torch.conv_transpose2d,
    3: torch.conv_transpose3d,
}


_BACKWARD: Final = torch.ops.aten.convolution_backward.default

# How a kernel moves over the input, in the order of `convolution_backward`: stride,
# padding, dilation, whether transposed, output padding, groups: each one number per
# dimension, or one for all.
_Shape: TypeAlias = tuple[Sizes, Sizes, Sizes, bool, Sizes, int]


def convolution(deferral: Deferral, num_dims: int) -> Routed:
    """Return `torch.conv{num_dims}d` with a deferred weight gradient."""
    operator: Callable[..., Tensor] = _PLAIN[num_dims]
    name = operator.__name__
    batched = num_dims + 2

    def route(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        if not defers(weight) or x.dim() != batched:
            return operator(x, weight, bias, stride, padding, dilation, groups)
        if isinstance(padding, str):
            x, padding = _padded(x, weight.shape[2:], dilation, padding)
        shape: _Shape = (stride, padding, dilation, False, 0, groups)
        value, put_off = detached_weight(bias)
        x, short, value = cast(x, weight.detach(), value)
        call = DeferredCall(name, (x,), weight, put_off, _gradients, shape)
        arguments = (x, short, value, stride, padding, dilation, groups)
        return deferral.enter(call, operator, arguments, value)

    return route


def transposed(deferral: Deferral, num_dims: int) -> Routed:
    """Return `torch.conv_transpose{num_dims}d` with a deferred weight gradient."""
    operator: Callable[..., Tensor] = _TRANSPOSED[num_dims]

    def route(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Tensor:
        more = (stride, padding, output_padding, groups, dilation)
        if not defers(weight) or x.dim() != num_dims + 2:
            return operator(x, weight, bias, *more)
        shape: _Shape = (stride, padding, dilation, True, output_padding, groups)
        value, put_off = detached_weight(bias)
        x, short, value = cast(x, weight.detach(), value)
        call = DeferredCall(operator.__name__, (x,), weight, put_off, _gradients, shape)
        return deferral.enter(call, operator, (x, short, value, *more), value)

    return route


def _gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Run the operator's own backward without the input's gradient."""
    (x,) = call.inputs
    weight = call.weight
    assert weight is not None
    if weight.dtype is not dy.dtype:  # autocast: only its shape is read
        weight = torch.empty_like(weight, dtype=dy.dtype)
    has_bias = call.bias is not None
    stride, padding, dilation, is_transposed, output_padding, groups = call.more
    num_dims = x.dim() - 2
    _, dw, db = _BACKWARD(
        dy,
        x,
        weight,
        [dy.shape[1]] if has_bias else None,
        _each(stride, num_dims),
        _each(padding, num_dims),
        _each(dilation, num_dims),
        is_transposed,
        _each(output_padding, num_dims),
        groups,
        [False, True, has_bias],
    )
    return dw, db if has_bias else None


def _padded(
    x: Tensor, kernel: Sequence[int], dilation: Sizes, padding: str
) -> tuple[Tensor, list[int]]:
    """Return padding as numbers: "same" pads by the kernel's extent, right side first.

    Where that is an odd number, the input gets the odd one here, as in torch itself.
    """
    num_dims = len(kernel)
    if padding == "valid":
        return x, [0] * num_dims
    steps = _each(dilation, num_dims)
    total = [d * (k - 1) for d, k in zip(steps, kernel, strict=True)]
    if any(t % 2 for t in total):
        more = [side for t in reversed(total) for side in (0, t % 2)]
        x = F.pad(x, more)
    return x, [t // 2 for t in total]


def _each(sizes: Sizes, num_dims: int) -> list[int]:
    if isinstance(sizes, int):
        return [sizes] * num_dims
    return [*sizes] * (num_dims if len(sizes) == 1 else 1)
