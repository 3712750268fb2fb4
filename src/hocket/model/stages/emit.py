"""Write the Python functions of one stage, in one mode.

The source of such a function, made once per stage and mode:

    def stage(self, device, state_1, ..., constant_7, ..., value_9, ...):
        linear = torch._C._nn.linear(value_9, state_1, state_2);  value_9 = None
        hocket_layer_seeds = self.hocket_layer_seeds
        before = hocket_layer_seeds.before(4)       before layer 4, which has dropout
        ...
        return (add,)

and of the one that makes its constants, once per number of samples:

    def stage(self, device, num_samples_1, state_2, ...):
        ...
        return (getitem, getitem_1)

Replaces an attention mask by the flag `is_causal`, or by none, where it can.
"""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from hocket.model.capture import bindings
from hocket.model.capture.module_call import ModuleCalls
from hocket.model.stages.layer_seeds import LayerSeeds, SeededModule, seed_points
from hocket.model.stages.part import Part, simple_mask
from hocket.model.trace.trace import CallSpan, Trace

_PAIR: Final = (0, 1)
_SEEDS: Final = "hocket_layer_seeds"  # among the objects of a stage's code
_NUMBER: Final = itertools.count()  # distinguishes sources in tracebacks


@dataclass(frozen=True, slots=True)
class Constants:
    """Makes the values that depend only on the sizes of the batch and the device.

    Args:
        function: takes the objects, the device, the number of samples, the lengths and
            the buffers.
        buffers: the buffers that it reads, by first name.
    """

    function: Callable[..., tuple[Any, ...]]
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """A stage in one mode, as functions.

    Args:
        function: takes the objects, the device, the state, the constants, and the
            values: those received, then the batch's tensors.
        state: the parameters and buffers that it reads, by first name.
        constants: makes the stage's constants, if it has any.
        objects: modules, inner graphs and constant tensors, as attributes.
        graph: the graph that `function` was compiled from.
        title: the function's name in tracebacks.
    """

    function: Callable[..., Any]
    state: tuple[str, ...]
    constants: Constants | None
    objects: SimpleNamespace
    graph: fx.Graph
    title: str


def layer_seeds_of(code: Code) -> LayerSeeds | None:
    """Return what seeds the layers of this code; None where none draws."""
    seeds: LayerSeeds | None = getattr(code.objects, _SEEDS, None)
    return seeds


def emit(
    part: Part,
    received: Sequence[fx.Node],
    leaves: Sequence[int],
    sent: Sequence[fx.Node],
    title: str,
    draws: Mapping[fx.Node, int],
    seeds: LayerSeeds,
    model: nn.Module,
    lengths: Sequence[tuple[int, int]],
) -> Code:
    """Write and compile the functions of a part.

    Args:
        part: the stage's calls.
        received: the calls whose values come from other stages, in order.
        leaves: the positions in the batch of the tensors that follow them.
        sent: the calls whose values go to other stages, in order.
        title: the function's name in tracebacks.
        draws: the first call of each layer that draws random numbers, and the layer's
            number in the uncut model.
        seeds: asked before each of these calls.
        model: the model whose modules run as they are.
        lengths: the sizes that constants are made of, besides the number of samples.
    """
    trace = part.flow.trace
    objects: dict[str, Any] = {}
    copy = _Copy(trace, objects)
    for node in part.state:
        copy.new[node] = copy.placeholder("state")
    for node in part.constants:
        copy.new[node] = copy.placeholder("constant")
    for node in part.masks:
        copy.masks[node] = copy.placeholder("mask"), copy.placeholder("is_causal")
    for node in received:
        copy.new[node] = copy.placeholder("value")
    placeholder_of = {position: node for node, position in trace.leaf_of.items()}
    for position in leaves:
        copy.new[placeholder_of[position]] = copy.placeholder("value")
    for node in part.body:
        if node in part.spans:
            copy.call(part.spans[node], model, draws, seeds)
        else:
            copy.seed(seeds, draws.get(node))
            copy.add(node, simple_mask(part.flow, node))
    copy.graph.output(copy.mapped(_result(part, sent)))
    return Code(
        _when_called(copy.graph, title),
        tuple(str(node.target) for node in part.state),
        _constants(part, objects, f"{title}, constants", lengths),
        SimpleNamespace(**objects),
        copy.graph,
        title,
    )


def compile_graph(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """Return a Python function of the objects and the graph's placeholders.

    Args:
        graph: calls only, of functions, methods and modules among the objects.
        title: the function's name in tracebacks.
    """
    code = graph.python_code("self")
    source = code.src.replace("def forward(", "def stage(", 1)
    filename = f"<hocket {title} #{next(_NUMBER)}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    exec(compile(source, filename, "exec"), code.globals)
    function: Callable[..., Any] = code.globals["stage"]
    return function


def _when_called(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """Return a function that is compiled by its first call.

    Of a stage, most workers run one mode or none, and a layout changes while they wait.
    """
    compiled: list[Callable[..., Any]] = []

    def stage(*arguments: Any) -> Any:
        if not compiled:
            compiled.append(compile_graph(graph, title))
        return compiled[0](*arguments)

    return stage


def _result(part: Part, sent: Sequence[fx.Node]) -> Any:
    if not part.is_last:
        return tuple(sent)
    (leaves,) = part.flow.trace.output.args
    assert isinstance(leaves, Sequence)
    return leaves[0] if part.flow.trace.out_spec.is_leaf() else leaves


def _constants(
    part: Part,
    objects: dict[str, Any],
    title: str,
    lengths: Sequence[tuple[int, int]],
) -> Constants | None:
    if not part.constants and not part.masks:
        return None
    trace = part.flow.trace
    copy = _Copy(trace, objects)
    copy.new[trace.num_samples] = copy.placeholder("num_samples")
    for place in lengths:
        node = copy.placeholder("length")
        if place in trace.lengths:
            copy.new[trace.lengths[place]] = node
    read = dict.fromkeys(x for node in part.kept for x in node.all_input_nodes)
    buffers = [node for node in read if trace.is_state(node)]
    for node in buffers:
        copy.new[node] = copy.placeholder("state")
    for node in part.kept:
        copy.add(node)
    wanted = [copy.mapped(node) for node in part.constants]
    for node in part.masks:
        pair = copy.graph.call_function(simplified, (copy.mapped(node),))
        wanted += [copy.graph.call_function(operator.getitem, (pair, i)) for i in _PAIR]
    copy.graph.output(tuple(wanted))
    names = tuple(str(node.target) for node in buffers)
    return Constants(_when_called(copy.graph, title), names)


class _Copy:
    """A new graph, and its node for each node of the trace.

    Of the trace's objects, those that the graph uses go into `objects`: keeping the
    modules of other stages would keep their weights.
    """

    def __init__(self, trace: Trace, objects: dict[str, Any]) -> None:
        self.trace = trace
        self.objects = objects
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.masks: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.num_placeholders = 0
        self.device = self.graph.placeholder("device")

    def placeholder(self, name: str) -> fx.Node:
        self.num_placeholders += 1
        return self.graph.placeholder(f"{name}_{self.num_placeholders}")

    def add(self, node: fx.Node, mask: fx.Node | None = None) -> None:
        """Copy one call; for attention with a simple mask, the mask becomes a flag."""
        if mask is not None:
            query_key_value, rest = node.args[:3], node.args[4:]
            simple, is_causal = self.masks[mask]
            args = (*self.mapped(query_key_value), simple, *self.mapped(rest))
            kwargs = {**self.mapped(node.kwargs), "is_causal": is_causal}
        else:
            args, kwargs = self.mapped(node.args), self.mapped(node.kwargs)
        if node.op == "call_module":
            self._use(str(node.target))
            self.new[node] = self.graph.create_node(
                "call_module", node.target, args, kwargs
            )
        else:
            self.new[node] = bindings.call(self.graph, node.target, args, kwargs)

    def call(
        self,
        span: CallSpan,
        model: nn.Module,
        draws: Mapping[fx.Node, int],
        seeds: LayerSeeds,
    ) -> None:
        """Call a module in place of the calls inside of it."""
        module = model.get_submodule(span.path)
        first, points = seed_points(self.trace, span.key, draws)
        self.seed(seeds, first)
        called: Any = SeededModule(module, points, seeds) if points else module
        calls = ModuleCalls(self.graph, self.objects, {})
        args, kwargs = pytree.tree_unflatten(list(span.given), span.spec)
        made = calls.add(span.key, called, args, kwargs, self.mapped)
        inside = {*self.trace.members[span.key]}
        for place, node in span.out.items():
            if node in inside:  # else it only passes it on
                one = span.returns_one
                self.new[node] = made if one else calls.taken(span.path, made, place)

    def seed(self, seeds: LayerSeeds, layer: int | None) -> None:
        """Add a call that seeds the generator before a layer, if there is one."""
        if layer is None:
            return
        self.objects[_SEEDS] = seeds
        asked = self.graph.create_node("get_attr", _SEEDS)
        self.graph.call_method("before", (asked, layer))

    def mapped(self, argument: Any) -> Any:
        return fx.node.map_aggregate(argument, self._mapped)

    def _mapped(self, argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return self.device
        if not isinstance(argument, fx.Node):
            return argument
        if argument not in self.new:
            self.new[argument] = self._object(argument)
        return self.new[argument]

    def _object(self, node: fx.Node) -> Any:
        value = self.graph.create_node("get_attr", str(node.target))
        if isinstance(self._use(str(node.target)), Tensor):
            return self.graph.call_method("to", (value, self.device))
        return value

    def _use(self, target: str) -> Any:
        value = self.objects[target] = self.trace.objects[target]
        return value


def simplified(mask: Tensor) -> tuple[Tensor | None, bool]:
    """Return a mask as `attn_mask` and `is_causal` of scaled_dot_product_attention.

    Libraries that look at a mask's values to leave it out cannot do so while they are
    captured. A mask that depends on nothing but the shape is looked at here instead,
    once per shape: attention without one, or with the flag, uses a faster kernel and
    the same one as the uncaptured model.

    Args:
        mask: boolean, true where attention is allowed; any leading dimensions, then
            queries x keys.

    Returns:
        The mask, or nothing where it allows everything or is exactly causal; and
        whether it is the latter.
    """
    if mask.dtype != torch.bool or mask.is_meta or is_fake(mask):
        return mask, False
    if bool(mask.all()):
        return None, False
    num_queries, num_keys = mask.shape[-2:]
    causal = torch.ones_like(mask[..., :, :]).tril()
    if num_queries == num_keys and torch.equal(mask, causal):
        return None, True
    return mask, False
