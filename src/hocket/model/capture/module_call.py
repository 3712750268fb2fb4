"""Adds calls of modules that are run as they are to a trace's graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hocket.model.capture.sequential import prefixes

# What a call in a graph may have as an argument; all else is one of its objects.
PLAIN: Final = (
    *(int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device),
)


def take(structure: Any, index: int) -> Any:
    """Return one leaf of what a module returned."""
    return pytree.tree_leaves(structure)[index]


def packed(spec: pytree.TreeSpec, *leaves: Any) -> Any:
    """Return an argument that a module is called with."""
    return pytree.tree_unflatten(list(leaves), spec)


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """The parts of a trace under construction that calls of modules go into.

    Args:
        graph: the trace's.
        objects: the trace's.
        modules: the trace's.
    """

    graph: fx.Graph
    objects: dict[str, Any]
    modules: dict[fx.Node, tuple[str, ...]]

    def add(
        self,
        path: str,
        module: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaf: Callable[[Any], Any],
    ) -> fx.Node:
        """Add a call.

        Args:
            path: the module's path in the model, or the key of this call of it.
            module: the module, or what runs it.
            args: its positional arguments, of any structure.
            kwargs: its keyword arguments.
            leaf: returns the node or constant of a leaf of the arguments.
        """
        target = f"module_{re.sub('[.@]', '_', path)}"
        self.objects[target] = module
        given = tuple(self._argument(path, x, leaf) for x in args)
        named = {key: self._argument(path, x, leaf) for key, x in kwargs.items()}
        node = self.graph.create_node("call_module", target, given, named)
        self.modules[node] = prefixes(path)
        return node

    def taken(self, path: str, made: fx.Node, index: int) -> fx.Node:
        """Take one leaf of what the module at `path` returned."""
        node = self.graph.call_function(take, (made, index))
        self.modules[node] = prefixes(path)
        return node

    def object(self, kind: str, value: Any) -> fx.Node:
        """Read an object that no call can have as an argument."""
        name = f"{kind}_{len(self.objects)}"
        self.objects[name] = value
        return self.graph.create_node("get_attr", name)

    def _argument(self, path: str, value: Any, leaf: Callable[[Any], Any]) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        nodes = [leaf(x) for x in leaves]
        if spec.is_leaf():
            return nodes[0]
        form = self.object("form", spec)
        node = self.graph.call_function(packed, (form, *nodes))
        self.modules[node] = prefixes(path)
        return node
