"""Graphs of operators: what they take and return, and parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

from torch import Tensor, fx

Nodes: TypeAlias = set[fx.Node]


def inputs_of_graph(graph: fx.Graph) -> list[fx.Node]:
    """In order."""
    return list(graph.find_nodes(op="placeholder"))


def results_of_graph(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Of a graph that returns a tuple of tensors."""
    (results,) = graph.output_node().args
    return cast("tuple[fx.Node, ...]", results)


def value_of(node: fx.Node) -> Tensor:
    """What it computes, without memory."""
    return cast("Tensor", node.meta["val"])


def needed(
    results: Iterable[fx.Node], given: frozenset[fx.Node] = frozenset()
) -> Nodes:
    """What must be computed for some results, themselves included.

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
    """A part of a graph as a module of its own.

    Args:
        module: that keeps the graph's constants.
        graph: the whole.
        inputs: any nodes.
        results: that need nothing but these.
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
