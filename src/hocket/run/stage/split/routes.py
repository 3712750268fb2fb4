"""The operators that are replaced, under all names by which they are called.

Embeddings: the rows of a weight. Their whole backward is a weight gradient.

Linear layers: `F.linear`, and those written as products (`x @ w`, mm and addmm).

Bilinear layers: y_o = a' w_o b + bias_o.

Shape letters: T tokens (all dimensions before the last together), I and J inputs,
O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.model.stages.reroute import Route
from hocket.run.stage.split.layers.call import (
    Deferral,
    DeferredCall,
    Pair,
    Routed,
    defers,
    detached_weight,
    in_rows,
    operands,
)
from hocket.run.stage.split.layers.convolution import convolution, transposed

aten = torch.ops.aten

# Convolutions, each with what a captured stage calls if there is no binding
# (model/capture/bindings.py).
_PLAIN: Final[Mapping[Routed, Any]] = {
    torch.conv1d: aten.conv1d,
    torch.conv2d: aten.conv2d,
    torch.conv3d: aten.conv3d,
}
_TRANSPOSED: Final[Mapping[Routed, Any]] = {
    torch.conv_transpose1d: aten.conv_transpose1d.default,
    torch.conv_transpose2d: aten.conv_transpose2d.input,
    torch.conv_transpose3d: aten.conv_transpose3d.input,
}


def make_routes(deferral: Deferral) -> dict[Any, Route]:
    """Return the replacement of every function whose weight gradient is deferred."""
    routes: dict[Any, Route] = {}
    for operator, packet in _PLAIN.items():
        route = Route(convolution(deferral, operator), 1, 2)
        routes |= dict.fromkeys((operator, packet.default, packet.padding), route)
    for operator, overload in _TRANSPOSED.items():
        route = Route(transposed(deferral, operator), 1, 2)
        routes |= dict.fromkeys((operator, overload), route)
    both = Route(bilinear(deferral), 2, 3)
    matmul = Route(product(deferral), 1)
    row = embedding(deferral)
    return {
        **routes,
        F.linear: Route(linear(deferral), 1, 2),
        torch.matmul: matmul,
        torch.mm: matmul,
        torch.addmm: Route(sum_and_product(deferral), 2, 0),
        torch.bilinear: both,
        aten.bilinear.default: both,
        torch.embedding: Route(row, 0),
        F.embedding: Route(_of_module(row), 1),
    }


def _of_module(route: Routed) -> Routed:
    """Return the route with the arguments of `torch.nn.functional.embedding`."""

    def embedding(
        indices: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if max_norm is not None:  # changes the weight before it reads it
            more = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
            return F.embedding(indices, weight, *more)
        row = -1 if padding_idx is None else padding_idx % weight.shape[0]
        return route(weight, indices, row, scale_grad_by_freq, sparse)

    return embedding


def embedding(deferral: Deferral) -> Routed:
    """Return the operator `torch.embedding` with a deferred gradient."""

    def route(
        weight: Tensor,
        indices: Tensor,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        more = (padding_idx, scale_grad_by_freq, sparse)
        if not defers(weight):
            return torch.embedding(weight, indices, *more)
        call = DeferredCall("embedding", (indices,), weight, None, _gradients, more)
        arguments = (weight.detach(), indices, *more)
        return deferral.enter(call, torch.embedding, arguments)

    return route


def _gradients(call: DeferredCall, dy: Tensor) -> Pair:
    (indices,) = call.inputs
    assert call.weight is not None
    num_rows = call.weight.shape[0]
    dw = torch.ops.aten.embedding_backward(dy, indices, num_rows, *call.more)
    return dw, None


def bilinear(deferral: Deferral) -> Routed:
    """Return the operator `torch.bilinear` with a deferred weight gradient."""

    def route(
        a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not defers(weight):
            return torch.bilinear(a, b, weight, bias)
        values, deferred = detached_weight(bias)
        call = DeferredCall("bilinear", (a, b), weight, deferred, _bilinear_gradients)
        arguments = (a, b, weight.detach(), values)
        return deferral.enter(call, torch.bilinear, arguments, values)

    return route


def _bilinear_gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Compute dw_OIJ, the sum over T of a, dy and b, with autograd's own formula."""
    a_TI, b_TJ = (in_rows(x).to(dy.dtype) for x in call.inputs)
    dy_TO = in_rows(dy)
    # Which of T O I J the tensors a, dy and b lack, and what is summed over.
    dw = torch._trilinear(a_TI, dy_TO, b_TJ, [1, 3], [2, 3], [1, 2], [0])
    return dw, None if call.bias is None else dy_TO.sum(0)


def linear(deferral: Deferral) -> Routed:
    """Return `torch.nn.functional.linear` with a deferred weight gradient."""

    def route(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not defers(weight):
            return F.linear(x, weight, bias)
        x, values, bias, deferred = operands(x, weight, bias)
        compute: Routed = F.linear
        if x.dim() > 2 and not x.is_contiguous():
            compute, x = partial(_folded, x.shape[:-1]), in_rows(x)
            values = values.t()
        call = DeferredCall("linear", (x,), weight, deferred, _linear_gradients)
        return deferral.enter(call, compute, (x, values, bias), bias)

    return route


def product(deferral: Deferral) -> Routed:
    """Return `torch.matmul` and `torch.mm` with a deferred weight gradient."""

    def route(x: Tensor, weight: Tensor) -> Tensor:
        if not defers(weight) or weight.dim() != 2 or x.dim() < 2:
            return torch.matmul(x, weight)
        x, values, _, _ = operands(x, weight, None)
        compute: Routed = torch.matmul
        if x.dim() > 2 and not x.is_contiguous():
            compute, x = partial(_folded, x.shape[:-1]), in_rows(x)
        call = DeferredCall("matmul", (x,), weight, None, _product_gradients)
        return deferral.enter(call, compute, (x, values))

    return route


def sum_and_product(deferral: Deferral) -> Routed:
    """Return `torch.addmm` with deferred gradients of weight and bias."""

    def route(
        bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        is_sum = beta == alpha == 1 and bias.dim() == 1
        if not defers(weight) or not is_sum:
            return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)
        x, values, added, deferred = operands(x, weight, bias)
        call = DeferredCall("addmm", (x,), weight, deferred, _product_gradients)
        return deferral.enter(call, torch.addmm, (added, x, values), added)

    return route


def _folded(
    shape: torch.Size, x_TI: Tensor, weight_IO: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute as torch does for strided inputs if the weight wants a gradient.

    For a weight without a gradient, torch would multiply sample by sample, with other
    last bits. The rows, which are a copy, are kept, as autograd keeps them.
    """
    y_TO = torch.mm(x_TI, weight_IO)
    y: Tensor = torch.ops.aten._unsafe_view(y_TO, (*shape, y_TO.shape[1]))
    return y if bias is None else y.add_(bias)


def _linear_gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Compute dw_OI = dy' x, multiplied as autograd does, and db_O, the sum of dy."""
    (x,) = call.inputs
    dy_TO = in_rows(dy)
    dw = dy_TO.t().mm(in_rows(x))
    return dw, None if call.bias is None else dy_TO.sum(0)


def _product_gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Compute dw_IO = x' dy, multiplied as autograd does, and db_O, the sum of dy."""
    assert call.weight is not None
    if call.weight.stride() == (1, call.weight.shape[0]):  # transposed
        dw_OI, db = _linear_gradients(call, dy)
        return None if dw_OI is None else dw_OI.t(), db
    (x,) = call.inputs
    dy_TO = in_rows(dy)
    return in_rows(x).t().mm(dy_TO), None if call.bias is None else dy_TO.sum(0)
