"""Traces a stage's forward and backward into one graph without side effects.

The stage runs on tensors that have no memory, and every operator that comes below
autograd is recorded: those of the forward, and of the backward that autograd runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hocket.model.stages.emit import Code
from hocket.run.stage.compiled.graph.graphs import (
    inputs_of_graph,
    results_of_graph,
    value_of,
)
from hocket.run.stage.compiled.inputs import Inputs, inputs_of


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The structure of what a stage returns, around its tensors.

    Args:
        spec: the structure.
        leaves: its leaves, in order; None in the place of a tensor.
        places: the places of tensors among the leaves.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    places: tuple[int, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class StageCall:
    """A call of a stage's code.

    Args:
        code: the stage's code.
        inputs: the sources of its tensors.
        args: the arguments behind the device; tensors may be without memory.
        device: the device that it will run on.
        autocast: the autocast context that it runs in.
    """

    code: Code
    inputs: Inputs
    args: tuple[Any, ...]
    device: torch.device
    autocast: AbstractContextManager[object]

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the stage's code on other tensors, in the order of `inputs`."""
        with self.inputs.replaced(self.code, self.args, tensors) as run, self.autocast:
            return run(self.device)


@dataclass(frozen=True, slots=True)
class FakeRun:
    """The result of a stage's call on tensors without memory.

    Args:
        call: the call.
        mode: the fake-tensor mode.
        fakes: the inputs without memory.
        shape: the structure of what it returned.
        outputs: the tensors that it returned.
    """

    call: StageCall
    mode: Any
    fakes: tuple[Tensor, ...]
    shape: OutputShape
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class JointGraph:
    """Forward and backward as one graph.

    Its inputs are the stage's tensors, then the gradients of some of its outputs. It
    returns what buffers become, the outputs, and the gradients.

    Args:
        module: the graph.
        mode: the fake-tensor mode of its tensors' values.
        buffers: the numbers of the tensors that get new values, in order.
        num_outputs: the number of the stage's outputs.
        wanted: the numbers of the tensors whose gradients it returns, in order.
    """

    module: fx.GraphModule
    mode: Any
    buffers: tuple[int, ...]
    num_outputs: int
    wanted: tuple[int, ...]

    @property
    def num_forward(self) -> int:
        """The number of its results that belong to the forward."""
        return len(self.buffers) + self.num_outputs


def run_on_fakes(
    code: Code,
    args: tuple[Any, ...],
    device: torch.device,
    autocast: AbstractContextManager[object],
) -> FakeRun:
    """Run a stage's code on tensors without memory.

    Args:
        code: the stage's code.
        args: the arguments behind the device; tensors may be without memory.
        device: the device that it will run on.
        autocast: the autocast context to run it in.
    """
    mode = make_mode()
    call = StageCall(code, inputs_of(code, args), args, device, autocast)
    first = len(call.inputs.args)
    constant = range(first, first + len(call.inputs.objects))  # each on its own device
    fakes = tuple(
        fake(mode, x, x.device if i in constant else device)
        for i, x in enumerate(call.inputs.tensors(code, args))
    )
    with on_fakes(mode):
        out = call.run(fakes)
    leaves, spec = pytree.tree_flatten(out)
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    rest = tuple(None if isinstance(x, Tensor) else x for x in leaves)
    shape = OutputShape(spec, rest, places)
    return FakeRun(call, mode, fakes, shape, tuple(leaves[i] for i in places))


def trace_joint(fake_run: FakeRun, differentiated: Sequence[bool]) -> JointGraph:
    """Trace forward and backward into one graph.

    Args:
        fake_run: the call.
        differentiated: for each output, whether a gradient comes back for it.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    num, wants = len(fake_run.fakes), [x.requires_grad for x in fake_run.fakes]
    tangents = [
        empty(fake_run.mode, x.shape, x.dtype, x.device)
        for x in compress(fake_run.outputs, differentiated)
    ]
    found: list[bool] = []

    def both(*flat: Tensor) -> list[Tensor]:
        leaves = pytree.tree_leaves(fake_run.call.run(flat[:num]))
        outputs = [leaves[i] for i in fake_run.shape.places]
        leaves = list(compress(flat[:num], wants))
        starts = list(compress(outputs, differentiated))
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if starts and leaves:
            grads = torch.autograd.grad(starts, leaves, flat[num:], allow_unused=True)
        found[:] = [grad is not None for grad in grads]
        return [*outputs, *(grad for grad in grads if grad is not None)]

    module = traced(both, [*fake_run.fakes, *tangents], fake_run.mode)
    module, buffers = _without_side_effects(module, num, fake_run.mode)
    wanted = tuple(compress(compress(range(num), wants), found))
    fake_run.mode.shape_env = ShapeEnv()  # empty; Inductor keeps nothing without one
    return JointGraph(module, fake_run.mode, buffers, len(fake_run.outputs), wanted)


def fake(mode: Any, like: Tensor, device: torch.device) -> Tensor:
    """Make a tensor without memory that is like another one, on a device."""
    with mode:
        made = torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device=device
        )
    return made.requires_grad_(like.requires_grad)


def make_mode() -> Any:
    """Make a fake-tensor mode without symbolic numbers.

    Code that depends on data raises an error in it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def empty(
    mode: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a tensor without memory."""
    with mode:
        return torch.empty(tuple(shape), dtype=dtype, device=device)


@contextmanager
def on_fakes(mode: Any) -> Iterator[None]:
    """Compute on tensors without memory while the block runs.

    Backwards run in this thread, where the modes are.

    Args:
        mode: the tensors' fake-tensor mode.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with (
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        enable_python_dispatcher(),
        mode,
    ):
        yield


def traced(function: Any, fakes: Sequence[Tensor], mode: Any) -> fx.GraphModule:
    """Trace a function of tensors without memory, with the backwards that it runs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with on_fakes(mode):
        return make_fx(function)(*fakes)


def _without_side_effects(
    module: fx.GraphModule, num_tensors: int, mode: Any
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return buffers' new values as results, and which inputs they belong to.

    Operators in place (a BatchNorm's statistics) become new tensors; and large
    operators become many small ones, for Inductor to fuse.

    Args:
        module: a graph of tensors without memory.
        num_tensors: its first inputs; those behind them are gradients.
        mode: the fake-tensor mode of its tensors.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [value_of(node).detach() for node in inputs_of_graph(module.graph)]
    with torch.no_grad(), mode:
        pure = make_fx(torch.func.functionalize(module), select_decomp_table())(*fakes)
    inputs = inputs_of_graph(pure.graph)
    found = taken_assignments(pure.graph).items()
    assigned = {inputs.index(old): new for old, new in found}
    buffers = tuple(sorted(assigned))
    results = (*(assigned[i] for i in buffers), *results_of_graph(pure.graph))
    return _named(pure, results, num_tensors), buffers


def taken_assignments(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Take the assignments to inputs out of a graph; return the new values."""
    assigned: dict[fx.Node, fx.Node] = {}
    copy_ = torch.ops.aten.copy_.default
    for node in graph.find_nodes(op="call_function", target=copy_):
        old, new = (cast("fx.Node", x) for x in node.args[:2])
        assigned[old] = new
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return assigned


def _named(
    module: fx.GraphModule, results: Sequence[fx.Node], num_tensors: int
) -> fx.GraphModule:
    """Name inputs and gradients as torch's partitioner expects."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs_of_graph(module.graph)):
        is_gradient = i >= num_tensors
        name = f"tangents_{i - num_tensors}" if is_gradient else f"primals_{i}"
        new[node] = graph.placeholder(name)
        new[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
