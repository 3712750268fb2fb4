"""Turns regions into functions, and finds the memory that each one takes.

    region of nodes ──▶ function of one list of tensors, which frees what it has read
                    ──▶ blocks: the storages that nodes make, and their last uses

A region's function gets its inputs in a list, which it empties: so a tensor that is
referred to nowhere else is freed where the region reads it last, and not at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree

from hocket.core.footprint import Footprint
from hocket.core.op import Kind
from hocket.run.outoforder.capture.regions import RegionKey, Regions
from hocket.run.outoforder.capture.trace import StepGraph
from hocket.run.outoforder.capture.update import UpdateGraph
from hocket.run.stage.compiled.graph.graphs import inputs_of_graph

_COPY: Final = torch.ops.aten.copy_.default


@dataclass(frozen=True, slots=True)
class RegionCode:
    """The function of one region.

    Args:
        run: takes the inputs in a list, which it empties; returns the outputs.
        inputs: the names of its inputs.
        outputs: the names of what it returns: what other regions read, and losses.
    """

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepCode:
    """All functions of a step.

    Args:
        regions: by kind and unit; regions without operators are missing.
        footprint: the memory of all regions, without what is there all the time.
        block_of: the block of each value that regions exchange.
        constants: the graph's constants, by name.
    """

    regions: Mapping[RegionKey, RegionCode]
    footprint: Footprint
    block_of: Mapping[str, int]
    constants: Mapping[str, Tensor]


def state_name(weight: str, key: str) -> str:
    """Return the name of a state of the optimizer as an input."""
    return f"{weight}:{key}"


def rate_name(group: int) -> str:
    """Return the name of a parameter group's learning rate as an input."""
    return f"rate:{group}"


def step_code(regions: Regions, updates: Mapping[int, UpdateGraph]) -> StepCode:
    """Make the functions of all regions.

    Args:
        regions: forward and backward.
        updates: the optimizer's step of each unit that has weights.
    """
    step = regions.step
    blocks, maker = _Blocks(step.graph), _RegionMaker(step)
    codes: dict[RegionKey, RegionCode] = {}
    events: dict[tuple[Kind, int], tuple[int, ...]] = {}
    for place, nodes in regions.nodes.items():
        codes[place] = maker.code(nodes)
        events[place] = tuple(blocks.events(nodes))
    for unit, update in updates.items():
        place = RegionKey(Kind.UPDATE, unit)
        gradients = [step.gradients[name] for name in update.names]
        codes[place] = _update(update, gradients, step.parameters)
        events[place] = tuple(blocks.update_events(update, gradients))
    constants = {
        node.name: _constant(step.module, node)
        for node in step.graph.find_nodes(op="get_attr")
    }
    names = {name for code in codes.values() for name in code.outputs}
    block_of = {x.name: blocks.of(x) for x in step.graph.nodes if x.name in names}
    return StepCode(codes, Footprint(tuple(blocks.sizes), events), block_of, constants)


class _RegionMaker:
    """Makes the functions of parts of a step's graph.

    Args:
        step: the step's graph.
    """

    def __init__(self, step: StepGraph) -> None:
        self._module = step.module
        self._results = {*step.losses.values(), *step.gradients.values()}
        self._buffer_of = {
            new: step.buffers[name] for name, new in step.new_buffers.items()
        }

    def code(self, nodes: Sequence[fx.Node]) -> RegionCode:
        """Return the function of a region, which also assigns to buffers.

        Args:
            nodes: the region's operators.
        """
        inside = set(nodes)
        assigned = {x: self._buffer_of[x] for x in nodes if x in self._buffer_of}
        read = [x for node in nodes for x in node.all_input_nodes]
        found = dict.fromkeys([*read, *assigned.values()])
        outputs = [x for x in nodes if _is_read(x, inside, self._results)]
        inputs = [x for x in found if x not in inside]
        graph = fx.Graph()
        new = {node: graph.placeholder(node.name) for node in inputs}
        for node in nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
        for node, buffer in assigned.items():
            graph.call_function(_COPY, (new[buffer], new[node]))
        graph.output(tuple(new[node] for node in outputs))
        names = tuple(x.name for x in inputs), tuple(x.name for x in outputs)
        return RegionCode(_boxed(self._module, graph), *names)


def _is_read(node: fx.Node, inside: set[fx.Node], results: set[fx.Node]) -> bool:
    """Return whether something outside of its region reads a node."""
    users = (user for user in node.users if user.op == "call_function")
    return node in results or any(user not in inside for user in users)


def _constant(module: fx.GraphModule, node: fx.Node) -> Tensor:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def _update(
    update: UpdateGraph, gradients: Sequence[fx.Node], parameters: Mapping[str, fx.Node]
) -> RegionCode:
    names = (
        *(parameters[name].name for name in update.names),
        *(node.name for node in gradients),
        *(state_name(name, key) for name, key in update.states),
        *(rate_name(group) for group in update.groups),
    )
    return RegionCode(_boxed(update.module, update.module.graph), names, ())


def _boxed(root: fx.GraphModule, graph: fx.Graph) -> Callable[..., Any]:
    graph.set_codegen(_BoxedCodeGen())
    module = fx.GraphModule(root, graph)
    run: Callable[..., Any] = module.forward
    return run


class _Blocks:
    """Numbers the storages that a graph's nodes make.

    Args:
        graph: every node has the tensor without memory that it makes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.sizes: list[int] = []
        self._number: dict[int, int] = {}
        self._maker: list[fx.Node] = []
        given = (*inputs_of_graph(graph), *graph.find_nodes(op="get_attr"))
        self._given = {key for node in given for key, _ in _storages(node)}
        self._add(graph)

    def _add(self, graph: fx.Graph) -> None:
        """Number the storages of a graph's calls."""
        for node in graph.nodes:
            for key, num_bytes in _storages(node) if node.op == "call_function" else ():
                if key not in self._given and key not in self._number:
                    self._number[key] = len(self.sizes)
                    self.sizes.append(num_bytes)
                    self._maker.append(node)

    def of(self, node: fx.Node) -> int:
        """Return the block that a node's tensor lies in; -1 if it is given."""
        ((key, _),) = _storages(node)
        return self._number.get(key, -1)

    def events(self, nodes: Sequence[fx.Node]) -> Iterator[int]:
        """Yield what a region's nodes make and read for the last time, in order."""
        ends = _last_uses(nodes)
        for node in nodes:
            for block in self._blocks_of(node):
                if self._maker[block] is node:
                    yield block + 1
            for key in ends.get(node, ()):
                if key not in self._given:
                    yield -(self._number[key] + 1)

    def _blocks_of(self, node: fx.Node) -> list[int]:
        """Return the blocks that a node's tensors lie in, each once."""
        keys = dict.fromkeys(key for key, _ in _storages(node))
        return [self._number[key] for key in keys if key not in self._given]

    def update_events(
        self, update: UpdateGraph, gradients: Sequence[fx.Node]
    ) -> Iterator[int]:
        """Yield the events of an update; several units may share its graph."""
        inputs = inputs_of_graph(update.module.graph)
        for node in update.module.graph.nodes:
            for key, _ in _storages(node):
                self._given.discard(key)
                self._number.pop(key, None)
        num = len(gradients)
        for given, gradient in zip(inputs[num : 2 * num], gradients, strict=True):
            block = self.of(gradient)
            for key, _ in _storages(given):
                if block < 0:
                    self._given.add(key)
                else:
                    self._number[key] = block
        for node in (*inputs[:num], *inputs[2 * num :]):
            self._given |= {key for key, _ in _storages(node)}
        self._add(update.module.graph)
        nodes = [x for x in update.module.graph.nodes if x.op == "call_function"]
        yield from self.events(nodes)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[int]]:
    """Return for each node the storages that no later node uses."""
    last: dict[int, fx.Node] = {}
    for node in nodes:
        for used in (*node.all_input_nodes, node):
            last.update({key: node for key, _ in _storages(used)})
    ends: defaultdict[fx.Node, list[int]] = defaultdict(list)
    for key, node in last.items():
        ends[node].append(key)
    return ends


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """Yield the storages of the tensors that a node makes, and their bytes."""
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage.nbytes()
