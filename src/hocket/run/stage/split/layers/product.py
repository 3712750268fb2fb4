"""Linear layers written as products: `x @ w`, `torch.mm` and `torch.addmm`.

Shape letters: T tokens (all dimensions before the last together), I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hocket.run.stage.split.layers.call import (
    DeferredCall,
    Pair,
    defers,
    detached_weight,
    in_rows,
)
from hocket.run.stage.split.layers.cast import cast
from hocket.run.stage.split.layers.deferral import Deferral, Routed


def product(deferral: Deferral) -> Routed:
    """Return `torch.matmul` and `torch.mm` with a deferred weight gradient."""

    def route(x: Tensor, weight: Tensor) -> Tensor:
        if not defers(weight) or weight.dim() != 2 or x.dim() < 2:
            return torch.matmul(x, weight)
        x, short, _ = cast(x, weight.detach(), None)
        compute: Routed = torch.matmul
        if x.dim() > 2 and not x.is_contiguous():
            compute, x = partial(_folded, x.shape[:-1]), in_rows(x)
        call = DeferredCall("matmul", (x,), weight, None, _gradients)
        return deferral.enter(call, compute, (x, short))

    return route


def sum_and_product(deferral: Deferral) -> Routed:
    """Return `torch.addmm` with deferred gradients of weight and bias."""

    def route(
        bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        is_sum = beta == alpha == 1 and bias.dim() == 1
        if not defers(weight) or not is_sum:
            return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)
        value, put_off = detached_weight(bias)
        x, short, value = cast(x, weight.detach(), value)
        call = DeferredCall("addmm", (x,), weight, put_off, _gradients)
        return deferral.enter(call, torch.addmm, (value, x, short), value)

    return route


def _folded(shape: torch.Size, x_TI: Tensor, weight_IO: Tensor) -> Tensor:
    """Compute as `torch.matmul` does for strided inputs if its weight wants a gradient.

    Without that, it would multiply sample by sample, with other last bits. The
    rows, which are a copy, are what is kept, as autograd keeps them.
    """
    y_TO = torch.mm(x_TI, weight_IO)
    y: Tensor = torch.ops.aten._unsafe_view(y_TO, (*shape, y_TO.shape[1]))
    return y


def _gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Compute dw_IO = x' dy, multiplied as autograd does, and db_O, the sum of dy."""
    (x,) = call.inputs
    dy_TO, x_TI = in_rows(dy), in_rows(x)
    assert call.weight is not None
    is_transposed = call.weight.stride() == (1, call.weight.shape[0])
    dw = dy_TO.t().mm(x_TI).t() if is_transposed else x_TI.t().mm(dy_TO)
    return dw, None if call.bias is None else dy_TO.sum(0)
