"""All graphs of a stage for one size of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final, TypeAlias

import torch
from torch import Tensor, fx

from hocket.model.stages.emit import layer_seeds_of
from hocket.run.stage.compiled.draws import Draws, draw_before, recorded_layers
from hocket.run.stage.compiled.graph.graphs import (
    extracted,
    inputs_of_graph,
    results_of_graph,
    value_of,
)
from hocket.run.stage.compiled.inputs import Inputs
from hocket.run.stage.compiled.lower import Lowered, lowered
from hocket.run.stage.compiled.products import Backward, lowered_backward
from hocket.run.stage.compiled.split_backward import SplitGraph, split_graph
from hocket.run.stage.compiled.trace import (
    FakeRun,
    JointGraph,
    OutputShape,
    on_fakes,
    trace_joint,
)

_MOST_NODES: Final = 10_000  # some minutes; loops over time are as many nodes as steps


Strides: TypeAlias = tuple[int, ...]


class CannotCompileError(Exception):
    """A stage cannot be compiled and runs uncompiled; the message has the reason."""


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """A backward as two graphs, I and W (`split_backward.py`).

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
