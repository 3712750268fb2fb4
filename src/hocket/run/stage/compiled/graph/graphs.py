"""Inputs, results and parts of graphs of operators.

Operators that compute input and weight gradients at once are divided:

    dx, dw, db = convolution_backward(dy, x, w, ..., [True, True, True])

becomes one operator with the mask [True, False, False], and one with what is left. The
others that Inductor leaves whole make no weight's gradient, or cannot make one alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
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


_BOTH: Final = torch.ops.aten.convolution_backward.default
_MASK: Final = 10  # its place among the arguments
_INPUT: Final = 0  # the place of dx among the results


def divide(graph: fx.Graph) -> None:
    """Divide all such operators in a graph."""
    for node in graph.find_nodes(op="call_function", target=_BOTH):
        mask = list(node.args[_MASK])
        if mask[_INPUT] and any(mask[1:]):
            _divide(graph, node, mask)


def _divide(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> None:
    rest = [False, *mask[1:]]
    with graph.inserting_after(node):
        weights = graph.call_function(_BOTH, _with_mask(node.args, rest))
    values = node.meta["val"]
    weights.meta = {**node.meta, "val": (None, *values[1:])}
    node.args = _with_mask(node.args, [True, False, False])
    node.meta = {**node.meta, "val": (values[_INPUT], None, None)}
    for user in list(node.users):
        if user.args[1] != _INPUT:
            user.replace_input_with(node, weights)


def _with_mask(args: tuple[Any, ...], mask: list[bool]) -> tuple[Any, ...]:
    return (*args[:_MASK], mask, *args[_MASK + 1 :])
