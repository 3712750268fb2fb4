"""Captures an nn.Sequential: its children, run as the modules they are."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from hocket.errors import CaptureError
from hocket.model.trace.example import Example
from hocket.model.trace.observe import NodeFacts, TensorInfo
from hocket.model.trace.per_sample import DATA
from hocket.model.trace.sizes import OpenSizes
from hocket.model.trace.state import State
from hocket.model.trace.trace import CallSpan, Trace


def is_plain_sequential(model: nn.Module) -> bool:
    """Return whether a model only calls its children one after the other."""
    is_plain = type(model).forward is nn.Sequential.forward
    return isinstance(model, nn.Sequential) and is_plain and not has_hooks(model)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks, or all modules do."""
    return any(hooks_of(module)) or bool(torch_module._has_any_global_hook())


def hooks_of(module: nn.Module, *, forward: bool = True) -> list[dict[int, Any]]:
    """Return where a module keeps its backward hooks, and its forward hooks."""
    found = [module._backward_hooks, module._backward_pre_hooks]
    return found + [module._forward_hooks, module._forward_pre_hooks] * forward


def trace_sequential(model: nn.Sequential, example: Example, state: State) -> Trace:
    """List the children's calls; plain Sequentials inside are opened.

    Raises:
        CaptureError: the example is not one positional argument.
    """
    positional, keywords = example.call()
    if len(positional) != 1 or keywords:
        raise CaptureError(
            "an nn.Sequential takes exactly one positional argument; the example has "
            f"{len(positional)} and the keywords {sorted(keywords)}"
        )
    graph = fx.Graph()
    num_samples = graph.placeholder("num_samples")
    leaves = [
        graph.placeholder(f"leaf_{i}") if isinstance(leaf, DATA) else leaf
        for i, leaf in enumerate(example.leaves)
    ]
    leaf_of = {x: i for i, x in enumerate(leaves) if isinstance(x, fx.Node)}
    value = pytree.tree_unflatten(leaves, example.spec)[0][0]
    objects: dict[str, Any] = {}
    modules: dict[fx.Node, tuple[str, ...]] = {}
    given: dict[str, Any] = {"": value}
    out: dict[str, fx.Node] = {}
    for path, module in _children(model, ""):
        target = f"module_{path.replace('.', '_')}"
        objects[target] = module
        opened = ("", *prefixes(path)[:-1])
        for outer in opened:
            given.setdefault(outer, value)
        value = graph.create_node("call_module", target, (value,), name=f"out_{target}")
        modules[value] = prefixes(path)
        out |= dict.fromkeys(opened, value)
    graph.output((value,))
    spec = pytree.tree_structure(0)
    spans = {path: _span(path, given[path], node) for path, node in out.items()}
    trace = Trace(
        graph, state, objects, leaf_of, num_samples, modules, spec, spans=spans
    )
    return replace(trace, open=OpenSizes(is_any=True))


def _span(path: str, value: Any, out: fx.Node) -> CallSpan:
    """Return the call of an nn.Sequential that is opened."""
    given, spec = pytree.tree_flatten(((value,), {}))
    around = ("", *prefixes(path)[:-1]) if path else ()
    return CallSpan(path, tuple(given), spec, {0: out}, True, True, around)


def open_structures(trace: Trace, facts: Mapping[fx.Node, NodeFacts]) -> bool:
    """Let single tensors cross a cut if a child returns a structure of them.

    A message carries tensors, so what a child returns is unpacked after it and packed
    again before the next child is called:

        (a, b) = first(x)           a cut between the two sends a and b
        second((a, b))

    Args:
        trace: the trace; its graph is changed.
        facts: the facts of the graph's nodes, for the structure that each returns.

    Returns:
        Whether anything was changed.
    """
    opened = False
    for node in trace.calls:
        (user, *_) = node.users
        structure = facts[node].structure
        if user.op == "call_module" and _can_open(structure):
            with trace.graph.inserting_after(node):
                user.args = (_unpacked(trace, node, structure),)
            opened = True
    return opened


def _can_open(structure: Any) -> bool:
    keys = (key for path, _ in pytree.tree_leaves_with_path(structure) for key in path)
    kinds = (pytree.SequenceKey, pytree.MappingKey)
    is_tensor = isinstance(structure, TensorInfo)
    return not is_tensor and all(isinstance(key, kinds) for key in keys)


def _unpacked(trace: Trace, node: fx.Node, structure: Any) -> Any:
    """Return the structure, made of the nodes that take its tensors out."""
    paths = trace.modules

    def take(path: tuple[Any, ...], leaf: object) -> Any:
        if not isinstance(leaf, TensorInfo):
            return leaf
        value = node
        for key in path:
            index = key.idx if isinstance(key, pytree.SequenceKey) else key.key
            with trace.graph.inserting_after(value):
                value = trace.graph.call_function(operator.getitem, (value, index))
            paths[value] = paths[node]
        return value

    return pytree.tree_map_with_path(take, structure)


def _children(model: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    # `_modules`, because `named_children` leaves out a module that is used twice.
    for name, child in model._modules.items():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Sequential) and is_plain_sequential(child):
            yield from _children(child, f"{path}.")
        elif child is not None:
            yield path, child


def prefixes(path: str) -> tuple[str, ...]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = path.split(".")
    return tuple(".".join(parts[: i + 1]) for i in range(len(parts)))
