"""Linear layers: y = x w' + b, whatever dimensions stand before x's last.

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
    detached_weight,
    in_rows,
)
from hocket.run.stage.split.layers.cast import cast
from hocket.run.stage.split.layers.deferral import Deferral, Routed


def linear(deferral: Deferral) -> Routed:
    """Return `torch.nn.functional.linear` with a deferred weight gradient."""

    def route(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not defers(weight):
            return F.linear(x, weight, bias)
        value, put_off = detached_weight(bias)
        x, short, value = cast(x, weight.detach(), value)
        compute: Routed = F.linear
        if x.dim() > 2 and not x.is_contiguous():
            compute, x = partial(_folded, x.shape[:-1]), in_rows(x)
        call = DeferredCall("linear", (x,), weight, put_off, _gradients)
        return deferral.enter(call, compute, (x, short, value), value)

    return route


def _folded(
    shape: torch.Size, x_TI: Tensor, weight_OI: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute as `F.linear` for strided inputs if only its weight wants a gradient.

    Without that, it would multiply sample by sample, with other last bits. The
    rows, which are a copy, are what is kept, as autograd keeps them.
    """
    y_TO = torch.mm(x_TI, weight_OI.t())
    y: Tensor = torch.ops.aten._unsafe_view(y_TO, (*shape, y_TO.shape[1]))
    return y if bias is None else y.add_(bias)


def _gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Compute dw_OI = dy' x, multiplied as autograd does, and db_O, the sum of dy."""
    (x,) = call.inputs
    dy_TO = in_rows(dy)
    dw = dy_TO.t().mm(in_rows(x))
    return dw, None if call.bias is None else dy_TO.sum(0)
