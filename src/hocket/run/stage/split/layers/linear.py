"""Linear layers: `F.linear`, and those written as products (`x @ w`, mm and addmm).

Shape letters: T tokens (all dimensions before the last together), I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.run.stage.split.layers.call import (
    DeferredCall,
    Pair,
    defers,
    in_rows,
    operands,
)
from hocket.run.stage.split.layers.deferral import Deferral, Routed


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
