"""Rewrites a graph without side effects.

Operators in place (a BatchNorm's statistics) become new tensors, which it returns; and
large operators become many small ones, for Inductor to fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from hocket.run.stage.compiled.graph.graphs import (
    inputs_of_graph,
    results_of_graph,
    value_of,
)


def without_side_effects(
    module: fx.GraphModule, num_tensors: int, mode: Any
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return buffers' new values as results, and which inputs they belong to.

    Args:
        module: a graph of tensors without memory.
        num_tensors: its first inputs; those behind them are gradients.
        mode: the fake-tensor mode of its tensors.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [value_of(node).detach() for node in inputs_of_graph(module.graph)]
    with torch.no_grad(), mode:
        pure = make_fx(torch.func.functionalize(module), select_decomp_table())(*fakes)
    inputs = inputs_of_graph(pure.graph)
    assigned: dict[int, fx.Node] = {}
    copy_ = torch.ops.aten.copy_.default
    for node in pure.graph.find_nodes(op="call_function", target=copy_):
        old, new = (cast("fx.Node", x) for x in node.args[:2])
        assigned[inputs.index(old)] = new
        node.replace_all_uses_with(new)
        pure.graph.erase_node(node)
    buffers = tuple(sorted(assigned))
    results = (*(assigned[i] for i in buffers), *results_of_graph(pure.graph))
    return _named(pure, results, num_tensors), buffers


def _named(
    module: fx.GraphModule, results: Sequence[fx.Node], num_tensors: int
) -> fx.GraphModule:
    """Name inputs and gradients as torch's partitioner expects."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs_of_graph(module.graph)):
        is_gradient = i >= num_tensors
        name = f"tangents_{i - num_tensors}" if is_gradient else f"primals_{i}"
        new[node] = graph.placeholder(name)
        new[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
