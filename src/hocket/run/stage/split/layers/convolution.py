"""Convolutions over one to three dimensions, grouped or not, and transposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.run.stage.split.layers.call import (
    Deferral,
    DeferredCall,
    Pair,
    Routed,
    defers,
    operands,
)

Sizes: TypeAlias = int | Sequence[int]

_BACKWARD: Final = torch.ops.aten.convolution_backward.default

# How a kernel moves over the input, in the order of `convolution_backward`: stride,
# padding, dilation, whether transposed, output padding, groups: each one number per
# dimension, or one for all.
_Shape: TypeAlias = tuple[Sizes, Sizes, Sizes, bool, Sizes, int]


def convolution(deferral: Deferral, operator: Routed) -> Routed:
    """Return a convolution with a deferred weight gradient.

    Args:
        deferral: collects the stage's calls.
        operator: `torch.conv1d`, `conv2d` or `conv3d`.
    """
    name = operator.__name__

    def route(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        if not defers(weight) or x.dim() != weight.dim():
            return operator(x, weight, bias, stride, padding, dilation, groups)
        if isinstance(padding, str):
            x, padding = _padded(x, weight.shape[2:], dilation, padding)
        shape: _Shape = (stride, padding, dilation, False, 0, groups)
        x, values, bias, deferred = operands(x, weight, bias)
        call = DeferredCall(name, (x,), weight, deferred, _gradients, shape)
        arguments = (x, values, bias, stride, padding, dilation, groups)
        return deferral.enter(call, operator, arguments, bias)

    return route


def transposed(deferral: Deferral, operator: Routed) -> Routed:
    """Return a transposed convolution with a deferred weight gradient.

    Args:
        deferral: collects the stage's calls.
        operator: `torch.conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d`.
    """
    name = operator.__name__

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
        if not defers(weight) or x.dim() != weight.dim():
            return operator(x, weight, bias, *more)
        shape: _Shape = (stride, padding, dilation, True, output_padding, groups)
        x, values, bias, deferred = operands(x, weight, bias)
        call = DeferredCall(name, (x,), weight, deferred, _gradients, shape)
        return deferral.enter(call, operator, (x, values, bias, *more), bias)

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
