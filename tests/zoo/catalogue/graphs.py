"""Convolutions on graphs, of torch_geometric.

Dense ones have a matrix of edges per graph. Sparse ones take all graphs of a batch as
one, with a list of edges, and most of them look at the edges' values (self-loops).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    DenseGCNConv,
    DenseSAGEConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    SAGEConv,
)

from tests.model.support.stages_by_hand import Case

NUM_NODES: Final = 5
NUM_EDGES: Final = 9


class Dense(nn.Module):
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


class Sparse(Dense):
    """The same, on one graph that holds all graphs of the batch."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """From nodes_GNF, and edges_G2E as pairs of a graph's own nodes."""
        num_graphs, num_nodes = nodes.shape[:2]
        first = torch.arange(num_graphs, device=edges.device) * num_nodes
        index = (edges + first[:, None, None]).transpose(0, 1).flatten(1)
        x = nodes.flatten(0, 1)
        for layer in self.layers:
            x = torch.relu(layer(x, index))
        return cast(Tensor, self.head(x.view(num_graphs, num_nodes, -1).mean(1)))


def gin(num_in: int, num_out: int) -> nn.Module:
    """Graph isomorphism, whose network is given."""
    return cast(nn.Module, GINConv(nn.Linear(num_in, num_out), train_eps=True))


def dense(convolution: Any) -> Case:
    """Graphs of five nodes."""
    edges = (torch.rand(4, NUM_NODES, NUM_NODES) < 0.5).float()
    return Case(Dense(convolution), (torch.randn(4, NUM_NODES, 6), edges))


def sparse(convolution: Any) -> Case:
    """Graphs of five nodes and nine edges, some of them loops."""
    edges = torch.randint(NUM_NODES, (4, 2, NUM_EDGES))
    return Case(Sparse(convolution), (torch.randn(4, NUM_NODES, 6), edges))


CASES: Final[dict[str, Callable[[], Case]]] = {
    "dense-gcn": partial(dense, DenseGCNConv),
    "dense-sage": partial(dense, DenseSAGEConv),
    "gat": partial(sparse, GATv2Conv),
    "gcn": partial(sparse, GCNConv),
    "gin": partial(sparse, gin),
    "sage": partial(sparse, SAGEConv),
}
