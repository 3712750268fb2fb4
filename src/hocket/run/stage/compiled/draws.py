"""Draws a compiled stage's random numbers before its graph runs, layer by layer.

A graph cannot seed a generator between two of its operators. So its random operators,
which need nothing but shapes, become inputs:

    before     bernoulli(empty, 0.9) ─▶ mul ...     after     input ─▶ mul ...

and each run draws these inputs first, in order, each layer from its own seed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.model.stages.layer_seeds import LayerSeeds
from hocket.model.trace.observe import is_random
from hocket.run.stage.compiled.graph.graphs import inputs_of_graph, value_of

_BY_SHAPE: Final = frozenset(
    {
        *("bernoulli.p", "native_dropout", "normal_functional", "rand", "rand_like"),
        *("randint", "randint_like", "randn", "randn_like", "uniform", "exponential"),
    }
)
_DROPOUT: Final = torch.ops.aten.native_dropout.default


@dataclass(frozen=True, slots=True)
class RandomCall:
    """One random operator of a graph.

    Args:
        layer: the layer's number in the uncut model.
        operator: the operator.
        args: its arguments, with shapes in place of tensors.
        kwargs: its keyword arguments.
    """

    layer: int
    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def made(self, device: torch.device) -> Tensor:
        """Draw; a dropout's result is the factor of each element."""
        args = [
            torch.ones(x.shape, dtype=x.dtype, device=device)
            if isinstance(x, _Form)
            else x
            for x in self.args
        ]
        found = self.operator(*args, **self.kwargs)
        out: Tensor = found[0] if self.operator is _DROPOUT else found
        return out


@dataclass(frozen=True, slots=True)
class _Form:
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Draws:
    """All random operators of a graph, in order.

    Args:
        draws: one for each of the graph's last inputs.
        seeds: called before the first draw of each layer.
    """

    draws: tuple[RandomCall, ...]
    seeds: LayerSeeds | None

    def made(self, device: torch.device) -> list[Tensor]:
        """Draw all of them."""
        layer, found = -1, []
        for draw in self.draws:
            if draw.layer != layer and self.seeds is not None:
                self.seeds.before(draw.layer)
            layer = draw.layer
            found.append(draw.made(device))
        return found


@contextmanager
def recorded_layers(seeds: LayerSeeds) -> Iterator[list[int]]:
    """Record the layer of each draw of a stage's code, in order.

    Args:
        seeds: the seeding that the code calls before each layer that draws.
    """
    mode = _DrawMode()
    seeds.seed = mode.begin
    try:
        with mode:
            yield mode.layers
    finally:
        seeds.seed = None


class _DrawMode(TorchDispatchMode):
    """Records the layer of each operator that draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types
        self.layers: list[int] = []
        self._layer = -1

    def begin(self, layer: int) -> None:
        """Record that a layer begins."""
        self._layer = layer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count operators that draw."""
        if is_random(func, args, kwargs or {}):
            self.layers.append(self._layer)
        return func(*args, **(kwargs or {}))


def draw_before(
    module: fx.GraphModule, layers: list[int], num_tensors: int
) -> tuple[RandomCall, ...] | str:
    """Turn a graph's random operators into inputs, in place.

    Args:
        module: the graph of a forward and its backward.
        layers: the layer of each draw of the forward, in order.
        num_tensors: the number of inputs before the gradients of outputs.

    Returns:
        What to draw before each run; or why that is impossible.
    """
    nodes = [
        node
        for node in module.graph.nodes
        if isinstance(node.target, OpOverload)
        and is_random(node.target, node.args, node.kwargs)
    ]
    for node in nodes:
        if _name(node.target) not in _BY_SHAPE:
            return f"it draws random numbers by {node.target}, from what it computes"
    if len(nodes) != len(layers):
        return f"its graph draws {len(nodes)} times, and its code {len(layers)} times"
    draws = []
    inputs = inputs_of_graph(module.graph)
    last = inputs[num_tensors - 1]
    for i, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
        args, kwargs = pytree.tree_map_only(fx.Node, _form_of, (node.args, node.kwargs))
        draws.append(RandomCall(layer, node.target, tuple(args), kwargs))
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"primals_{num_tensors + i}")
        _put(module.graph, node, last)
    module.recompile()
    return tuple(draws)


def _name(target: OpOverload) -> str:
    packet = target.overloadpacket.__name__
    return str(target).removeprefix("aten.") if packet == "bernoulli" else packet


def _form_of(node: fx.Node) -> _Form:
    value = value_of(node)
    return _Form(value.shape, value.dtype)


def _put(graph: fx.Graph, node: fx.Node, drawn: fx.Node) -> None:
    """Replace a random operator by its input."""
    if node.target is not _DROPOUT:
        drawn.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)
        return
    outs = node.meta["val"]
    drawn.meta["val"] = outs[0]
    with graph.inserting_before(node):
        ops = torch.ops.aten
        kept = graph.call_function(ops.mul.Tensor, (node.args[0], drawn))
        mask = graph.call_function(ops.ne.Scalar, (drawn, 0))
    kept.meta["val"], mask.meta["val"] = outs
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(mask if user.args[1] else kept)
        graph.erase_node(user)
    graph.erase_node(node)
