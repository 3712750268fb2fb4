"""Rewrites a step's graph so that weight gradients are nodes of their own.

- `convolution_backward` becomes one call for the input and one for the weights. (Linear
  layers have two products as they are, and an embedding's input wants no gradient.)
- A weight that is used at every step in time has a sum of products as its gradient. One
  product of all steps' tensors takes its place:

      dy0ᵀ x0 + dy1ᵀ x1 + dy2ᵀ x2   ──▶   [dy0 dy1 dy2]ᵀ [x0 x1 x2]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, fx

from hocket.run.stage.compiled.graph.divide import divide
from hocket.run.stage.compiled.graph.graphs import results_of_graph, value_of

_MM: Final = torch.ops.aten.mm.default
_ADD: Final = torch.ops.aten.add.Tensor
_T: Final = torch.ops.aten.t.default
_DETACH: Final = torch.ops.aten.detach.default
_CLONE: Final = torch.ops.aten.clone.default
_CAT: Final = torch.ops.aten.cat.default
_FEWEST: Final = 3  # products; tied weights have two, which belong to two layers


def rewrite(graph: fx.Graph, first: int, num_gradients: int) -> None:
    """Rewrite a graph of forward and backward in place.

    Args:
        graph: without side effects.
        first: the place of the first gradient among its results.
        num_gradients: the number of gradients.
    """
    for node in graph.find_nodes(op="call_function", target=_DETACH):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    _drop_double_transposes(graph)
    divide(graph)
    graph.eliminate_dead_code()
    for place in range(first, first + num_gradients):
        _join_products(graph, results_of_graph(graph)[place])
    _own_gradients(graph, range(first, first + num_gradients))
    graph.eliminate_dead_code()
    graph.lint()


def _drop_double_transposes(graph: fx.Graph) -> None:
    """Replace the transpose of a transpose: what autograd makes of each `x @ w.T`."""
    for node in graph.find_nodes(op="call_function", target=_T):
        inner = cast("fx.Node", node.args[0])
        if inner.target is _T:
            node.replace_all_uses_with(cast("fx.Node", inner.args[0]))
            graph.erase_node(node)


def _join_products(graph: fx.Graph, gradient: fx.Node) -> None:
    """Replace a sum of products by one product, if it has as many as a loop makes."""
    root = cast("fx.Node", gradient.args[0]) if gradient.target is _T else gradient
    products: list[fx.Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.target is _ADD and len(node.args) == 2 and not node.kwargs:
            waiting += cast("tuple[fx.Node, fx.Node]", node.args)
        elif node.target is _MM and len(node.users) == 1:
            products.append(node)
        else:
            return
    if len(products) < _FEWEST:
        return
    products.reverse()
    with graph.inserting_before(root):
        joined = [
            _called(graph, _CAT, [p.args[side] for p in products], 1 - side)
            for side in range(2)
        ]
        product = _called(graph, _MM, *joined)
    root.replace_all_uses_with(product)


def _own_gradients(graph: fx.Graph, places: Sequence[int]) -> None:
    """Copy gradients in memory that others read: an update may change its gradient."""
    results = list(results_of_graph(graph))
    nodes = [node for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    sharing: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        sharing[_storage(node)].append(node)
    storages = [_storage(results[place]) for place in places]
    for place, storage in zip(places, storages, strict=True):
        own = sharing[storage]
        is_read = any(node.op == "placeholder" or len(node.users) > 1 for node in own)
        has_holes = 0 in value_of(results[place]).stride()
        if is_read or has_holes or storages.count(storage) > 1:
            with graph.inserting_after(results[place]):
                results[place] = _called(graph, _CLONE, results[place])
    graph.output_node().args = (tuple(results),)


def _storage(node: fx.Node) -> int:
    number: int = value_of(node).untyped_storage()._cdata
    return number


def _called(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Insert a call, with the tensor without memory that it makes."""
    node = graph.call_function(target, args)
    fakes = fx.map_arg(args, value_of)
    value: Tensor = target(*fakes)
    node.meta["val"] = value
    return node
