"""Inputs, results and parts of graphs of operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

from torch import Tensor, fx

Nodes: TypeAlias = set[fx.Node]


def inputs_of_graph(graph: fx.Graph) -> list[fx.Node]:
    """Return the graph's inputs, in order."""
    return list(graph.find_nodes(op="placeholder"))


def results_of_graph(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the results of a graph that returns a tuple of tensors."""
    (results,) = graph.output_node().args
    return cast("tuple[fx.Node, ...]", results)


def value_of(node: fx.Node) -> Tensor:
    """Return what a node computes, as a tensor without memory."""
    return cast("Tensor", node.meta["val"])


def needed(
    results: Iterable[fx.Node], given: frozenset[fx.Node] = frozenset()
) -> Nodes:
    """Return the nodes needed for some results, the results included.

    Args:
        results: any nodes.
        given: nodes that need not be computed.
    """
    found: Nodes = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in given and node.op != "placeholder":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def extracted(
    module: fx.GraphModule,
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a part of a graph as a module of its own.

    Args:
        module: the module that keeps the graph's constants.
        graph: the whole graph.
        inputs: any nodes.
        results: nodes that need only these inputs.
    """
    part = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = part.placeholder(node.name)
        new[node].meta = dict(node.meta)
    inside = needed(results, frozenset(inputs))
    for node in graph.nodes:
        if node in inside and node not in new:
            new[node] = part.node_copy(node, new.__getitem__)
    part.output(tuple(new[node] for node in results))
    return fx.GraphModule(module, part)
