"""Bilinear layers: y_o = a' w_o b + bias_o.

Shape letters: T tokens (all dimensions before the last together), I and J inputs,
O outputs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hocket.run.stage.split.layers.call import (
    DeferredCall,
    Pair,
    defers,
    detached_weight,
    in_rows,
)
from hocket.run.stage.split.layers.deferral import Deferral, Routed

# Which of T O I J the tensors a_TI, w_OIJ and b_TJ lack, and what is summed over.
_A, _W, _B = [1, 3], [0], [1, 2]
_SUMMED: Final = [2, 3]


def bilinear(deferral: Deferral) -> Routed:
    """Return the operator `torch.bilinear` with a deferred weight gradient."""

    def route(
        a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not defers(weight):
            return torch.bilinear(a, b, weight, bias)
        values, deferred = detached_weight(bias)
        call = DeferredCall("bilinear", (a, b), weight, deferred, _gradients)
        arguments = (a, b, weight.detach(), values)
        return deferral.enter(call, torch.bilinear, arguments, values)

    return route


def _gradients(call: DeferredCall, dy: Tensor) -> Pair:
    """Compute dw_OIJ, the sum over T of a, dy and b, with autograd's own formula."""
    a_TI, b_TJ = (in_rows(x).to(dy.dtype) for x in call.inputs)
    dy_TO = in_rows(dy)
    dw = torch._trilinear(a_TI, dy_TO, b_TJ, _A, _SUMMED, _B, _W)
    return dw, None if call.bias is None else dy_TO.sum(0)
