"""Convolutions on graphs, of torch_geometric: batches of dense graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import DenseGCNConv, DenseSAGEConv

from tests.model.support.stages_by_hand import Case


class Graphs(nn.Module):
    """Three convolutions, and the mean over nodes."""

    def __init__(self, convolution: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        sizes = ((6, 8), (8, 8), (8, 8))
        self.layers = nn.ModuleList(convolution(a, b) for a, b in sizes)
        self.head = nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = torch.relu(layer(nodes, edges))
        return cast(Tensor, self.head(nodes.mean(1)))


def graphs(convolution: Any) -> Case:
    """Graphs of five nodes."""
    edges = (torch.rand(4, 5, 5) < 0.5).float()
    return Case(Graphs(convolution), (torch.randn(4, 5, 6), edges))


CASES: Final[dict[str, Callable[[], Case]]] = {
    "dense-gcn": partial(graphs, DenseGCNConv),
    "dense-sage": partial(graphs, DenseSAGEConv),
}
