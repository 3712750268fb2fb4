"""Cuts the graph of a backward into I and W.

I is what the gradients of the stage's inputs need, W what only weights' gradients need:

    dy ──▶ gelu' ──▶ mm ──▶ norm' ──▶ mm ──▶ dx         I
              │               │  └▶ sums ▶ dγ, dβ       I, too: they are small, and what
              ▼               ▼                         they are sums of is not
             mm ▶ dw2        mm ▶ dw1                   W

So only those gradients wait that take a large operator (a product, a convolution, a
scatter), and those that need nothing more to be held (a bias's). Where no input wants a
gradient, the chain of large operators is I's all the same: to W belongs the last of
each branch. What W reads of I's is held in between; views of it are made again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

from torch import fx

from hocket.run.stage.compiled.graph.divide import divide
from hocket.run.stage.compiled.graph.graphs import (
    Nodes,
    extracted,
    inputs_of_graph,
    needed,
    results_of_graph,
)

_LARGE: Final = frozenset(
    (
        *("_unsafe_masked_index_put_accumulate", "addmm", "baddbmm", "bmm", "mm"),
        *("convolution", "convolution_backward", "embedding_dense_backward"),
        *("index_add", "index_put", "scatter_add", "scatter_reduce"),
    )
)
_VIEWS: Final = frozenset(
    (
        *("expand", "permute", "reshape", "select", "slice", "squeeze", "t"),
        *("transpose", "unsqueeze", "view"),
    )
)


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A backward as two graphs.

    I takes what the backward takes, and returns the gradients that do not wait, then
    what is held. W takes some of the backward's inputs, then what is held.

    Args:
        first: I.
        second: W.
        early: the numbers of the gradients that I returns, in order.
        late: the numbers of the gradients that W returns, in order.
        reads: the numbers of the backward's inputs that W takes, in order.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    early: tuple[int, ...]
    late: tuple[int, ...]
    reads: tuple[int, ...]


def split_graph(
    backward: fx.GraphModule, is_weight: Sequence[bool]
) -> SplitGraph | None:
    """Cut a backward's graph; return None if no gradient would wait.

    Args:
        backward: the graph; it is not changed.
        is_weight: for each result, whether it is the gradient of a weight.
    """
    graph = deepcopy(backward.graph)
    divide(graph)
    results = results_of_graph(graph)
    late = _late(results, is_weight)
    if not late:
        return None
    early = [i for i in range(len(results)) if i not in late]
    _, again = _fixed_point([results[i] for i in early], [results[i] for i in late])
    reads = [node for node in graph.nodes if node in _read(again)]
    inputs = inputs_of_graph(graph)
    kept = [node for node in reads if node.op != "placeholder"]
    given = [node for node in reads if node.op == "placeholder"]
    return SplitGraph(
        extracted(backward, graph, inputs, [*(results[i] for i in early), *kept]),
        extracted(backward, graph, [*given, *kept], [results[i] for i in late]),
        tuple(early),
        tuple(late),
        tuple(inputs.index(node) for node in given),
    )


def _late(results: Sequence[fx.Node], is_weight: Sequence[bool]) -> list[int]:
    """Return the numbers of the gradients that wait for W."""
    weights = [i for i, is_one in enumerate(is_weight) if is_one]
    first = [x for x, is_one in zip(results, is_weight, strict=True) if not is_one]
    late, others, held = _large(results, weights, first)
    known = held.union(*(_cone([results[i]], others) for i in late))
    trunk = needed([*first, *(x for x in held if x.op != "placeholder")])
    for i in weights:
        cone = _cone([results[i]], trunk)
        if cone and _read(cone) <= known:
            late.add(i)
    return sorted(late)


def _large(
    results: Sequence[fx.Node], weights: Sequence[int], first: Sequence[fx.Node]
) -> tuple[set[int], Nodes, Nodes]:
    """Return the gradients with a large operator of their own, I's nodes, and W's."""
    late, others = set(weights), needed(first)
    while True:
        alone = {
            i: any(map(_is_large, _cone([results[i]], others))) for i in sorted(late)
        }
        late = {i for i, is_one in alone.items() if is_one}
        early = [results[i] for i in range(len(results)) if i not in late]
        others, again = _fixed_point(early, [results[i] for i in sorted(late)])
        if all(alone.values()):
            return late, others, _read(again)


def _fixed_point(
    early: Sequence[fx.Node], late: Sequence[fx.Node]
) -> tuple[Nodes, Nodes]:
    """Return the nodes of I and the nodes of W; views may be in both."""
    first: Nodes = set()
    while True:
        second = _cone(late, first)
        more = needed([*early, *(x for x in _read(second) if x.op != "placeholder")])
        if more <= first:
            return first, second
        first |= more


def _cone(results: Sequence[fx.Node], others: Nodes) -> Nodes:
    """Return what W computes for some results, up to what others compute.

    It takes the last of several large operators in a row.
    """
    depth: dict[fx.Node, int] = {}
    waiting = [(node, 0) for node in results]
    while waiting:
        node, above = waiting.pop()
        if not _may_be_in(node, others):
            continue
        now = above + _is_large(node)
        if now > depth.get(node, -1):
            depth[node] = now
            waiting += [(x, now) for x in node.all_input_nodes]
    return {node for node, num in depth.items() if num <= 1}


def _may_be_in(node: fx.Node, others: Nodes) -> bool:
    if node.op == "placeholder":
        return False
    if node not in others:
        is_item = node.target is operator.getitem
        return not (is_item and node.args[0] in others)
    return _name(node) in _VIEWS or not node.all_input_nodes


def _read(nodes: Nodes) -> Nodes:
    """Return the inputs that nodes take from other nodes."""
    return {x for node in nodes for x in node.all_input_nodes if x not in nodes}


def _is_large(node: fx.Node) -> bool:
    return _name(node) in _LARGE


def _name(node: fx.Node) -> str:
    """Return an operator's name, without its namespace and overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)
