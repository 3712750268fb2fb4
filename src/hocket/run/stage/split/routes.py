"""The operators that are replaced, under all names by which they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.model.stages.reroute import Route
from hocket.run.stage.split.layers.bilinear import bilinear
from hocket.run.stage.split.layers.convolution import convolution, transposed
from hocket.run.stage.split.layers.deferral import Deferral, Routed
from hocket.run.stage.split.layers.embedding import embedding
from hocket.run.stage.split.layers.linear import linear, product, sum_and_product

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
