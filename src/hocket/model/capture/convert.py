"""Turns an exported program into a trace: fewer nodes, the model's own names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from hocket.errors import CaptureError
from hocket.model.capture import bindings
from hocket.model.capture.as_is import PLACES, ModulesAsIs, WatchedCall
from hocket.model.capture.export import ASSIGNED
from hocket.model.capture.module_call import PLAIN, ModuleCalls
from hocket.model.trace.example import Example
from hocket.model.trace.sizes import OpenSizes
from hocket.model.trace.state import State
from hocket.model.trace.trace import CallSpan, Trace

aten = torch.ops.aten


def with_grad_mode(enabled: bool, inner: Callable[..., Any], *args: Any) -> Any:
    """Run a part of the model under `torch.no_grad()` or `enable_grad()`."""
    with torch.set_grad_enabled(enabled):
        return inner(*args)


def with_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    inner: Callable[..., Any],
    *args: Any,
) -> Any:
    """Run a part of the model under `torch.autocast(...)`."""
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return inner(*args)


# Checks of what held in the example. They cost time and are of no use here.
_CHECKS: Final = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.default,
        aten._assert_async.msg,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
_INNER: Final = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: with_grad_mode,
    torch.ops.higher_order.wrap_with_autocast: with_autocast,
}


def to_trace(
    exported: tuple[ExportedProgram, OpenSizes],
    state: State,
    as_is: ModulesAsIs,
    example: Example,
) -> Trace:
    """Return the program's graph with parameters and buffers under their names.

    Args:
        exported: what torch.export made of the model, and what sizes it is right for.
        state: the model's parameters and buffers.
        as_is: the calls of modules, some of which are run as they are.
        example: says which sizes are open.

    Raises:
        CaptureError: the model changes its own inputs, or holds objects that are
            neither tensors nor plain values.
    """
    program, sizes = exported
    return replace(_Conversion(program, state, as_is, example).trace(), open=sizes)


class _Conversion:
    """One pass over the program's nodes."""

    def __init__(
        self,
        program: ExportedProgram,
        state: State,
        as_is: ModulesAsIs,
        example: Example,
    ) -> None:
        self.program = program
        self.example = example
        self.state = state
        self.as_is = as_is
        self.data_sized: set[fx.Node] = set()
        self.graph = fx.Graph()
        self.num_samples = self.graph.placeholder("num_samples")
        self.objects: dict[str, Any] = {}
        self.leaf_of: dict[fx.Node, int] = {}
        self.modules: dict[fx.Node, tuple[str, ...]] = {}
        self.new: dict[fx.Node, Any] = {}
        self.read: dict[str, fx.Node] = {}
        self.sizes: dict[str, fx.Node] = {}  # by symbol
        self.lengths: dict[tuple[int, int], fx.Node] = {}

    def trace(self) -> Trace:
        for spec in self.program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(
                    f"the model cannot be captured: it changes {spec.target!r} in a "
                    f"way that torch.export reports as {spec.kind.name}"
                )
        placeholders = [x for x in self.program.graph.nodes if x.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        inputs = [spec for spec in specs if spec.kind is InputKind.USER_INPUT]
        for node, spec in zip(placeholders, specs, strict=True):
            self.new[node] = self._input(node, spec, inputs)
        for node in self.program.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._call(node)
        outputs = self._mapped(self.program.graph.output_node().args[0])
        self.graph.output(fx.node.map_arg(outputs, self._computed))
        self.graph.eliminate_dead_code(_must_stay)
        alive = set(self.graph.nodes)
        return Trace(
            self.graph,
            self.state,
            self.objects,
            self.leaf_of,
            self.num_samples,
            {node: paths for node, paths in self.modules.items() if node in alive},
            self.program.call_spec.out_spec,
            frozenset(self.data_sized & alive),
            _spans(self.program, self.as_is.watched, self.new, alive),
            {key.partition("@")[0]: x for key, x in self.as_is.special.items()},
            frozenset(self.as_is.drawing),
            self.lengths,
        )

    def _input(self, node: fx.Node, spec: InputSpec, inputs: list[InputSpec]) -> Any:
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                return self._read(str(spec.target))
            case InputKind.CONSTANT_TENSOR:
                return self._object(node.name, self.program.constants[str(spec.target)])
            case InputKind.USER_INPUT if isinstance(node.meta.get("val"), torch.Tensor):
                placeholder = self.graph.placeholder(node.name)
                leaf = self.leaf_of[placeholder] = inputs.index(spec)
                for dim, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt) and str(size) not in self.sizes:
                        self.sizes[str(size)] = self._size(leaf, dim)
                return placeholder
            case InputKind.USER_INPUT:
                return node.meta.get("val")
            case _:
                raise CaptureError(
                    "the model cannot be captured: it holds the object "
                    f"{spec.target!r}, which is neither a tensor nor a module"
                )

    def _size(self, leaf: int, dim: int) -> fx.Node:
        if (leaf, dim) not in self.example.open:
            return self.num_samples
        self.lengths[leaf, dim] = self.graph.placeholder(f"length_{leaf}_{dim}")
        return self.lengths[leaf, dim]

    def _computed(self, node: fx.Node) -> fx.Node:
        """Return an output; of a parameter itself, a view, which a stage makes."""
        if node.op != "get_attr":
            return node
        return self.graph.call_function(aten.alias.default, (node,))

    def _read(self, name: str) -> fx.Node:
        first = self.state.first_name[name]
        if first not in self.read:
            self.read[first] = self.graph.create_node("get_attr", first)
        return self.read[first]

    def _object(self, name: str, value: Any) -> fx.Node:
        self.objects[name] = value
        return self.graph.create_node("get_attr", name)

    def _call(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            inner = getattr(self.program.graph_module, str(node.target))
            bindings.rebind(inner)
            self.new[node] = self._object(str(node.target), inner)
        elif node.target is torch.ops.hocket.module_as_is.default:
            self._call_module(node)
        elif node.target not in _CHECKS and node not in self.new:
            self.new[node] = self._copied(node)
            self._assign(node)

    def _call_module(self, node: fx.Node) -> None:
        """Call the module, and take what the graph reads of what it returns."""
        name, tensors, sizes, *_ = node.args
        call = self.as_is.calls[str(name)]
        calls = ModuleCalls(self.graph, self.objects, self.modules)

        def leaf(value: Any) -> Any:
            is_plain = isinstance(value, (fx.Node, *PLAIN))
            return value if is_plain else calls.object("constant", value)

        args, kwargs = call.arguments(self._mapped(tensors), self._mapped(sizes))
        made = calls.add(call.path, call.module, args, kwargs, leaf)
        for user in node.users:
            place: Any = user.args[1]
            out = call.out
            self.new[user] = calls.taken(call.path, made, out[place]) if out else made
            self._assign(user)

    def _copied(self, node: fx.Node) -> Any:
        if node.target is aten.sym_size.int:
            size = self.sizes.get(str(node.meta.get("val")))
            if size is not None:
                return size
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        if node.target is aten.slice.Tensor and _is_whole(*args):
            return args[0]
        target: Any = node.target
        target = _INNER.get(target, target)
        new = self.graph.create_node("call_function", target, args, kwargs, node.name)
        if free_unbacked_symbols(node.meta.get("val")):
            self.data_sized.add(new)
        return self._note(node, new)

    def _note(self, node: fx.Node, new: fx.Node) -> fx.Node:
        stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        self.modules[new] = tuple(
            dict.fromkeys(
                _with_call(key, path) for key, (path, _) in stack.items() if path
            )
        )
        return new

    def _assign(self, node: fx.Node) -> None:
        """Copy into its buffer what a submodule assigned to it."""
        name = node.meta.get(ASSIGNED)
        if name is not None:
            value = self.graph.call_function(aten.detach.default, (self.new[node],))
            pair = (self._read(name), self._note(node, value))
            self._note(node, self.graph.call_function(aten.copy_.default, pair))

    def _mapped(self, argument: Any) -> Any:
        return fx.node.map_arg(argument, self.new.__getitem__)


def _spans(
    program: ExportedProgram,
    watched: Mapping[str, WatchedCall],
    new: Mapping[fx.Node, Any],
    alive: Set[fx.Node],
) -> dict[str, CallSpan]:
    """Return the calls of modules, with the nodes of their arguments and results."""
    nodes: dict[tuple[str, str, int], fx.Node] = {}
    for node in program.graph.nodes:
        for place in node.meta.get(PLACES, ()):
            if new.get(node) in alive:
                nodes[place] = new[node]
    found = {}
    for key, call in watched.items():
        if call.out_spec is None:
            continue
        given = tuple(
            nodes.get((key, "given", i)) if isinstance(leaf, torch.Tensor) else leaf
            for i, leaf in enumerate(call.given)
        )
        is_known = call.is_known and all(
            isinstance(x, fx.Node if isinstance(leaf, torch.Tensor) else PLAIN)
            for x, leaf in zip(given, call.given, strict=True)
        )
        places = range(call.out_spec.num_leaves)
        out = {i: x for i in places if (x := nodes.get((key, "out", i)))}
        is_one = call.out_spec.is_leaf()
        found[key] = CallSpan(key, given, call.spec, out, is_one, is_known, call.around)
    return found


def _with_call(key: str, path: str) -> str:
    """Return a module's path, with `@1` if this is its second call."""
    _, at, call = key.partition("@")
    return path + at + call


def _is_whole(
    value: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> bool:
    """Return whether a slice takes all; the arguments are those of aten.slice."""
    to_end = end is None or end == sys.maxsize
    return start in (None, 0) and to_end and step == 1


def _must_stay(node: fx.Node) -> bool:
    """Return whether a node has a side effect."""
    if node.op != "call_function":
        return node.op != "get_attr"
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target in _INNER.values()
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    is_batch_norm = "batch_norm" in node.target.name()  # writes its running statistics
    return node.target._schema.is_mutable or is_random or is_batch_norm
