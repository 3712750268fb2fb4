"""Compiles regions with Inductor; results keep eager's strides and aliasing.

    operators of a region ──▶ one result for each storage that others read ──▶ Inductor
                                       │
               what the plain region returns: views of these, and of the inputs

So the other regions need not know which ones are compiled. The footprint counts only
blocks shared between regions; what Inductor allocates inside is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hocket.core.op import Kind
from hocket.model.trace.observe import is_random
from hocket.run.outoforder.capture.captured_step import CapturedStep
from hocket.run.outoforder.capture.code import RegionCode, RegionEnds, StepCode
from hocket.run.outoforder.capture.lstm import FUSED_LSTM
from hocket.run.outoforder.capture.regions import RegionKey
from hocket.run.stage.compiled.graph.graphs import value_of
from hocket.run.stage.compiled.lower import Lowered, lowered, settings

_FEWEST_KERNELS: Final = 2  # of one, there is nothing to fuse


@dataclass(frozen=True, slots=True)
class View:
    """The memory of a result.

    Args:
        source: the place of the tensor that it is a view of, among the inputs, and
            behind them what the compiled function makes.
        size: its shape.
        stride: its strides.
        offset: the number of elements between the source's first one and its own.
    """

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, source: Tensor) -> Tensor:
        """Return the view."""
        begin = source.storage_offset() + self.offset
        return source.as_strided(self.size, self.stride, begin)


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """A region, compiled.

    Args:
        plain: the region as its operators.
        function: takes the inputs in a list, which it empties; returns a tensor for
            each new storage.
        views: the region's outputs, then the new values of buffers.
        assigned: for each new value, the place of the buffer among the inputs.
    """

    plain: RegionCode
    function: Lowered
    views: tuple[View, ...]
    assigned: tuple[int, ...]

    def results(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute the outputs and new values; no tensor is changed.

        Args:
            inputs: empty afterwards.
        """
        num = len(inputs)
        read = {x.source: inputs[x.source] for x in self.views if x.source < num}
        made = self.function(inputs)
        return [
            view.of(read[view.source] if view.source < num else made[view.source - num])
            for view in self.views
        ]

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute the outputs, and assign to buffers."""
        buffers = [inputs[place] for place in self.assigned]
        results = self.results(inputs)
        num = len(results) - len(buffers)
        for buffer, value in zip(buffers, results[num:], strict=True):
            buffer.copy_(value)
        return results[:num]

    def code(self) -> RegionCode:
        """Return the region's function."""
        return replace(self.plain, run=self.run)


class RegionCompiler:
    """Compiles regions of one step; regions that are alike share a function.

    Args:
        step: the step.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self._ends = RegionEnds(step.regions.step)
        self._known: dict[str, Lowered] = {}

    def compiled(self, place: RegionKey) -> CompiledRegion | None:
        """Compile a region; return None if there is nothing in it for Inductor.

        Regions that draw random numbers stay as they are, since only torch's kernels
        draw those of eager mode; so do updates, which are one kernel on a GPU.
        """
        nodes = self._step.regions.nodes.get(place, ())
        plain = self._step.code.regions[place]
        if place.kind is Kind.UPDATE or not _is_worth_it(nodes):
            return None
        inputs, outputs, assigned = self._ends.of(nodes)
        values = [node.meta.get("val") for node in inputs]
        results = [*outputs, *assigned]
        bases = _bases(nodes, inputs, results)
        if bases is None or not all(isinstance(value, Tensor) for value in values):
            return None
        views = tuple(_view(node, [*inputs, *bases]) for node in results)
        buffers = tuple(inputs.index(buffer) for buffer in assigned.values())
        function = self._function(nodes, inputs, bases)
        return CompiledRegion(plain, function, views, buffers)

    def _function(
        self,
        nodes: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        bases: Sequence[fx.Node],
    ) -> Lowered:
        module = _module(self._step.regions.step.module, nodes, inputs, bases)
        text = _text(module.graph)
        if text not in self._known:
            self._known[text] = _lowered(module, [value_of(node) for node in inputs])
        return self._known[text]


def with_compiled(
    code: StepCode, compiled: Mapping[RegionKey, CompiledRegion]
) -> StepCode:
    """Return a step's functions, some of which are compiled."""
    regions = {place: region.code() for place, region in compiled.items()}
    events = dict(code.footprint.events)
    for place, region in regions.items():
        shared = {code.block_of[name] + 1 for name in region.outputs}
        events[place] = _outer(events[place], shared)
    footprint = replace(code.footprint, events=events)
    return replace(code, regions={**code.regions, **regions}, footprint=footprint)


def _outer(events: Sequence[int], shared: set[int]) -> tuple[int, ...]:
    """Return a region's events without blocks only this region uses.

    An event is the number of a block: positive where it is made, negative where it is
    freed. Inputs count until the end, since Inductor decides when it frees them.
    """
    made = {block for block in events if block > 0}
    inside = made - shared
    first = [event for event in events if event > 0 and event not in inside]
    last = [event for event in events if event < 0 and -event not in inside]
    return (*first, *last)


def _is_worth_it(nodes: Sequence[fx.Node]) -> bool:
    num_kernels = 0
    seen: set[int] = set()
    for node in nodes:
        target = node.target
        if target is FUSED_LSTM or target is torch.ops.hocket.lstm_backward.default:
            return False
        if not isinstance(target, OpOverload):
            continue
        if is_random(target, node.args, node.kwargs):
            return False
        seen |= {_storage(x) for x in node.all_input_nodes if _is_tensor(x)}
        value = node.meta["val"]
        is_view = isinstance(value, Tensor) and _storage(node) in seen
        num_kernels += not is_view
    return num_kernels >= _FEWEST_KERNELS


def _bases(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> list[fx.Node] | None:
    """Return a tensor for each storage in which results lie, and no input does.

    Returns:
        None if a tensor does not fill its storage, or has another type than a view.
    """
    owner = {_storage(node): node for node in inputs if _is_tensor(node)}
    bases: dict[int, fx.Node] = {}
    for node in nodes:
        if _is_tensor(node):
            bases.setdefault(_storage(node), node)
    for result in results:
        source = owner.get(_storage(result)) or bases[_storage(result)]
        if value_of(source).dtype is not value_of(result).dtype:
            return None
    wanted = {_storage(node) for node in results} - owner.keys()
    found = [node for key, node in bases.items() if key in wanted]
    for node in found:
        value = value_of(node)
        size = value.numel() * value.element_size()
        if value.storage_offset() or size != value.untyped_storage().nbytes():
            return None
    return found


def _view(node: fx.Node, sources: Sequence[fx.Node]) -> View:
    value = value_of(node)
    keys = [_storage(x) if _is_tensor(x) else None for x in sources]
    place = sources.index(node) if node in sources else keys.index(_storage(node))
    offset = value.storage_offset() - value_of(sources[place]).storage_offset()
    return View(place, tuple(value.shape), value.stride(), int(offset))


def _module(
    root: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(inputs):
        new[node] = graph.placeholder(f"x{i}")
        new[node].meta = dict(node.meta)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)


def _text(graph: fx.Graph) -> str:
    """Return a text that is the same for graphs that compute the same."""
    number: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        number[node] = f"%{len(number)}"
        args = fx.map_arg((node.args, node.kwargs), lambda x: _Name(number[x]))
        if node.op == "placeholder":
            x = value_of(node)
            lines.append(f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}")
        else:
            lines.append(f"{node.target} {args}")
    return "\n".join(lines)


class _Name(str):
    """A node in a text, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _lowered(module: fx.GraphModule, values: Sequence[Tensor]) -> Lowered:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [value.detach() for value in values]
    mode: Any = fakes[0].fake_mode  # type: ignore[attr-defined]
    ignored = warnings.catch_warnings(action="ignore")  # they are torch's own
    with settings(), torch.no_grad(), ignored:
        with mode:
            small = make_fx(module, select_decomp_table())(*fakes)
        return lowered(small, mode, is_backward=False)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _storage(node: fx.Node) -> int:
    number: int = value_of(node).untyped_storage()._cdata
    return number
