"""A model's calls as one graph, in the order in which the model makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from hocket.model.trace.sizes import OpenSizes
from hocket.model.trace.state import State


@dataclass(frozen=True, slots=True)
class CallSpan:
    """One call of a module, whose inside a trace has as calls of its own.

    Args:
        key: the module's path in the model, with `@1` if this is its second call; ""
            is the model itself.
        given: the leaves of `(args, kwargs)`: nodes and plain constants.
        spec: the structure of `(args, kwargs)`.
        out: the nodes of the tensors that it returned, by leaf.
        returns_one: whether it returned one tensor rather than a structure.
        is_known: whether nodes or plain constants are known for all leaves.
        around: the keys of the calls that it is inside of, outermost first.
    """

    key: str
    given: tuple[Any, ...]
    spec: pytree.TreeSpec
    out: Mapping[int, fx.Node]
    returns_one: bool
    is_known: bool
    around: tuple[str, ...]

    @property
    def path(self) -> str:
        """The module's path in the model."""
        return self.key.partition("@")[0]


@dataclass(frozen=True, slots=True)
class Trace:
    """One mode (training or evaluation) of a model, as a graph of calls.

    The graph's nodes are of five kinds only:

        placeholder     a tensor of the batch, or a size of one
        get_attr        a parameter or buffer by its first name, or one of `objects`
        call_function   one operator
        call_module     one module, run as it is; its target is one of `objects`
        output          the flat list of the model's outputs

    Args:
        graph: the nodes.
        state: the model's parameters and buffers.
        objects: modules, inner graphs and constant tensors, by target.
        leaf_of: the position in the batch of each placeholder that is a tensor.
        num_samples: the node for the batch's size, wherever the graph computes with it.
        lengths: the nodes for the sizes that are open besides, by leaf and dimension.
        open: what lengths it is right for.
        modules: the paths of the modules that each call happens in, outermost first.
        out_spec: puts the outputs back into the model's own structure.
        data_sized: the calls that return tensors whose shapes depend on the data.
        spans: the calls of modules that could run as they are in place of their inside,
            by key, in the order in which they begin.
        as_is: the modules whose own code does what calls in a graph do not: by path,
            what that is.
        drawing: the calls, by key, that draw random numbers of Python or NumPy.
    """

    graph: fx.Graph
    state: State
    objects: Mapping[str, Any]
    leaf_of: Mapping[fx.Node, int]
    num_samples: fx.Node
    modules: dict[fx.Node, tuple[str, ...]]
    out_spec: pytree.TreeSpec
    data_sized: frozenset[fx.Node] = frozenset()
    spans: Mapping[str, CallSpan] = field(default_factory=dict)
    as_is: Mapping[str, str] = field(default_factory=dict)
    drawing: frozenset[str] = frozenset()
    lengths: Mapping[tuple[int, int], fx.Node] = field(default_factory=dict)
    open: OpenSizes = field(default_factory=OpenSizes)

    @property
    def sizes(self) -> tuple[fx.Node, ...]:
        """The nodes for sizes: placeholders that are no tensors."""
        return self.num_samples, *self.lengths.values()

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """The nodes that compute, in order."""
        kinds = ("call_function", "call_module")
        return tuple(node for node in self.graph.nodes if node.op in kinds)

    @property
    def output(self) -> fx.Node:
        """The last node."""
        return self.graph.output_node()

    def is_state(self, node: fx.Node) -> bool:
        """Return whether a node reads a parameter or buffer."""
        return node.op == "get_attr" and node.target in self.state.tensors

    def reads(self, node: fx.Node) -> tuple[str, ...]:
        """Return the first names of the parameters and buffers that a node reads."""
        if node.op == "call_module":
            return self.state.below(self.path_of(node))
        names = (str(arg.target) for arg in node.all_input_nodes if self.is_state(arg))
        return tuple(dict.fromkeys(names))

    @property
    def members(self) -> dict[str, list[fx.Node]]:
        """The calls inside of each call of a module, by its key, in order."""
        found: dict[str, list[fx.Node]] = {"": [*self.calls]}
        for node in self.calls:
            for key in self.modules.get(node, ()):
                found.setdefault(key, []).append(node)
        return found

    def runs_as_is(self, key: str) -> bool:
        """Return whether a call of a module is in the trace as one call."""
        path = key.partition("@")[0]
        calls = (x for x in self.members.get(key, ()) if x.op == "call_module")
        return any(f"{path}.".startswith(f"{self.path_of(x)}.") for x in calls)

    def path_of(self, node: fx.Node) -> str:
        """Return the innermost module that a node belongs to."""
        paths = self.modules.get(node, ())
        return paths[-1] if paths else ""
