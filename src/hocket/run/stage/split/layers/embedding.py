"""Embeddings: the rows of a weight. Their whole backward is a weight gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.run.stage.split.layers.call import DeferredCall, Pair, defers
from hocket.run.stage.split.layers.deferral import Deferral, Routed


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
