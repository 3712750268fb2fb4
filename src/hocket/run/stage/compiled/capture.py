"""All graphs of a stage for one size of microbatches."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from typing import Final, TypeAlias

import torch
from torch import Tensor, fx

from hocket.model.stages.emit import layer_seeds_of
from hocket.run.stage.compiled.draws import Draws, draw_before, recorded_layers
from hocket.run.stage.compiled.graph.graphs import (
    Nodes,
    divide,
    extracted,
    inputs_of_graph,
    needed,
    results_of_graph,
    value_of,
)
from hocket.run.stage.compiled.inputs import Inputs
from hocket.run.stage.compiled.lower import Backward, Lowered, lowered, lowered_backward
from hocket.run.stage.compiled.trace import (
    FakeRun,
    JointGraph,
    OutputShape,
    on_fakes,
    trace_joint,
)

# Cuts the graph of a backward into I and W.
#
# I is what the gradients of the stage's inputs need, W what only weights' gradients
# need:
#
#     dy ──▶ gelu' ──▶ mm ──▶ norm' ──▶ mm ──▶ dx         I
#               │               │  └▶ sums ▶ dγ, dβ       I, too: they are small, and
#               ▼               ▼                         what they are sums of is not
#              mm ▶ dw2        mm ▶ dw1                   W
#
# So only those gradients wait that take a large operator (a product, a convolution, a
# scatter), and those that need nothing more to be held (a bias's). Where no input wants
# a gradient, the chain of large operators is I's all the same: to W belongs the last of
# each branch. What W reads of I's is held in between; views of it are made again.


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


_MOST_NODES: Final = 10_000  # some minutes; loops over time are as many nodes as steps


Strides: TypeAlias = tuple[int, ...]


class CannotCompileError(Exception):
    """A stage cannot be compiled and runs uncompiled; the message has the reason."""


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """A backward as two graphs, I and W.

    Args:
        first: I: takes what was kept and the outputs' gradients; returns gradients,
            then what W holds.
        second: W.
        reads: the numbers of I's inputs that W takes, before what is held.
    """

    first: Backward
    second: Backward
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledCapture:
    """A stage compiled for one size.

    Args:
        inputs: the sources of its tensors.
        shape: the form of what it returns.
        depends: for each output, whether it depends on anything that wants a gradient.
        differentiated: for each output, whether a gradient comes back for it.
        strides: the strides of the gradients that come back.
        values: the strides of the tensors that are no state, by their numbers.
        leaves: the numbers of the tensors that want a gradient.
        buffers: the numbers of the tensors that get new values.
        weights: the numbers of the other tensors that get a gradient.
        draws: the random numbers to draw before each run of F.
        forward: F: takes the tensors and what was drawn, and returns what buffers
            become, the outputs, and what it keeps.
        whole: B: takes what was kept and the outputs' gradients.
        split: I and W, if any weight gradient waits.
    """

    inputs: Inputs
    shape: OutputShape
    depends: tuple[bool, ...]
    differentiated: tuple[bool, ...]
    strides: tuple[Strides, ...]
    values: Mapping[int, Strides]
    leaves: tuple[int, ...]
    buffers: tuple[int, ...]
    weights: tuple[int, ...]
    draws: Draws
    forward: Lowered
    whole: Backward | None
    split: SplitBackward | None


@dataclass(frozen=True, slots=True)
class RequiredGraphs:
    """The backward graphs that the schedule needs.

    Args:
        whole: whether it has ops B.
        split: whether it has ops I and W.
    """

    whole: bool
    split: bool


def capture_stage(
    fake_run: FakeRun,
    differentiated: Sequence[bool],
    num_fixed: int,
    needs: RequiredGraphs,
) -> CompiledCapture:
    """Trace a stage, cut its graph, and compile the parts.

    Args:
        fake_run: a call of the stage.
        differentiated: for each output, whether a gradient comes back for it.
        num_fixed: how many of the call's arguments are parameters, buffers and
            constants; those behind them come with each microbatch.
        needs: the backward graphs to compile.

    Raises:
        CannotCompileError: a backward needs what the forward overwrites, or the graph
            is too large.
    """
    joint = trace_joint(fake_run, differentiated)
    draws = _draws(fake_run, joint)
    num_nodes = len(joint.module.graph.nodes)
    if num_nodes > _MOST_NODES:
        raise CannotCompileError(
            f"its graph has {num_nodes:,} operators, and compiling more than "
            f"{_MOST_NODES:,} would take very long"
        )
    places = fake_run.call.inputs.args
    fakes = fake_run.fakes
    values = {
        i: fakes[i].stride() for i, place in enumerate(places) if place >= num_fixed
    }
    leaves = tuple(i for i in values if fakes[i].requires_grad)
    weights = tuple(i for i in joint.wanted if i not in leaves)
    likes = {i: fakes[i] for i in weights}
    forward, backward = _partitioned(joint)
    whole = split = None
    if backward is not None:
        _check_kept(joint, forward)
        if needs.split:
            graphs = split_graph(backward, [i in likes for i in joint.wanted])
            split = None if graphs is None else _lowered(graphs, joint, likes)
        if needs.whole or (needs.split and split is None):
            whole = lowered_backward(backward, joint.mode, joint.wanted, likes)
    return CompiledCapture(
        fake_run.call.inputs,
        fake_run.shape,
        tuple(x.requires_grad for x in fake_run.outputs),
        tuple(differentiated),
        tuple(_dense(x) for x in compress(fake_run.outputs, differentiated)),
        values,
        leaves,
        joint.buffers,
        weights,
        draws,
        lowered(forward, joint.mode, is_backward=False),
        whole,
        split,
    )


def _dense(like: Tensor) -> Strides:
    """Return the strides of a new tensor of the same shape."""
    return torch.empty(like.shape, device="meta").stride()


def _draws(fake_run: FakeRun, joint: JointGraph) -> Draws:
    seeds = layer_seeds_of(fake_run.call.code)
    layers: list[int] = []
    if seeds is not None:
        with on_fakes(fake_run.mode), recorded_layers(seeds) as layers:
            fake_run.call.run(fake_run.fakes)
    found = draw_before(joint.module, layers, len(fake_run.fakes))
    if isinstance(found, str):
        raise CannotCompileError(found)
    return Draws(found, seeds)


def _partitioned(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    from torch._inductor.compile_fx import partition_fn

    graph = joint.module.graph
    inputs = inputs_of_graph(graph)
    if not joint.wanted:
        return extracted(joint.module, graph, inputs, results_of_graph(graph)), None
    fakes = [value_of(node) for node in inputs]
    forward, backward = partition_fn(
        joint.module, fakes, num_fwd_outputs=joint.num_forward
    )
    return forward, backward


def _check_kept(joint: JointGraph, forward: fx.GraphModule) -> None:
    """Refuse a backward that needs the old value of a buffer that F changes."""
    changed = {f"primals_{i}" for i in joint.buffers}
    kept = results_of_graph(forward.graph)[joint.num_forward :]
    if changed & {node.name for node in kept}:
        raise CannotCompileError("its backward needs a buffer that its forward changes")


def _lowered(
    split_graphs: SplitGraph, joint: JointGraph, likes: Mapping[int, Tensor]
) -> SplitBackward:
    early = [joint.wanted[i] for i in split_graphs.early]
    late = [joint.wanted[i] for i in split_graphs.late]
    return SplitBackward(
        lowered_backward(split_graphs.first, joint.mode, early, likes),
        lowered_backward(split_graphs.second, joint.mode, late, likes),
        split_graphs.reads,
    )
