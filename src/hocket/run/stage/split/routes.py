"""The operators that are replaced, under all names by which they are called."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.model.stages.reroute import Route
from hocket.run.stage.split.layers.bilinear import bilinear
from hocket.run.stage.split.layers.convolution import convolution, transposed
from hocket.run.stage.split.layers.deferral import Deferral, Routed
from hocket.run.stage.split.layers.embedding import embedding
from hocket.run.stage.split.layers.linear import linear
from hocket.run.stage.split.layers.product import product, sum_and_product

aten = torch.ops.aten

# What a captured stage calls if there is no binding (model/capture/bindings.py).
_PADDED: Final[dict[int, Any]] = {1: aten.conv1d, 2: aten.conv2d, 3: aten.conv3d}
_TRANSPOSED: Final[dict[int, tuple[Any, Any]]] = {
    1: (torch.conv_transpose1d, aten.conv_transpose1d.default),
    2: (torch.conv_transpose2d, aten.conv_transpose2d.input),
    3: (torch.conv_transpose3d, aten.conv_transpose3d.input),
}
_PLAIN: Final[dict[int, Any]] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def make_routes(deferral: Deferral) -> dict[Any, Route]:
    """Return the replacement of every function whose weight gradient is deferred."""
    routes: dict[Any, Route] = {}
    for num_dims in (1, 2, 3):
        route = Route(convolution(deferral, num_dims), 1, 2)
        names = _PADDED[num_dims]
        for name in (_PLAIN[num_dims], names.default, names.padding):
            routes[name] = route
        for name in _TRANSPOSED[num_dims]:
            routes[name] = Route(transposed(deferral, num_dims), 1, 2)
    both = Route(bilinear(deferral), 2, 3)
    row = embedding(deferral)
    return {
        **routes,
        F.linear: Route(linear(deferral), 1, 2),
        torch.matmul: Route(product(deferral), 1),
        torch.mm: Route(product(deferral), 1),
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
            return F.embedding(
                indices,
                weight,
                padding_idx,
                max_norm,
                norm_type,
                scale_grad_by_freq,
                sparse,
            )
        row = -1 if padding_idx is None else padding_idx % weight.shape[0]
        return route(weight, indices, row, scale_grad_by_freq, sparse)

    return embedding
