"""Traces forward, loss and backward of a training step into one graph.

The model runs on tensors that have no memory. The graph has no side effects: buffers
(a BatchNorm's statistics) get new values, which it returns. Its operators are those of
eager mode, so that the same kernels compute the same bits.

    weights, buffers, batch ──▶ forward ──▶ losses, new buffers
                       start ──▶ backward ──▶ gradients of the weights
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hocket.errors import CaptureError, HocketError, ModelError
from hocket.model.capture.source_line import source_line_of
from hocket.model.guards.reached import reached_by
from hocket.model.trace.observe import storage_of
from hocket.run.data.batch import call_arguments
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.outoforder.capture.lstm import RnnTracing
from hocket.run.stage.compiled.capture import CannotCompileError
from hocket.run.stage.compiled.graph.graphs import (
    divide,
    inputs_of_graph,
    results_of_graph,
    value_of,
)
from hocket.run.stage.compiled.trace import (
    empty,
    fake,
    make_mode,
    on_fakes,
    taken_assignments,
    traced,
)
from hocket.run.stage.compiled.traceable import check_traceable
from hocket.run.stage.split.layers.accumulate import has_hooks

# Rewrites a step's graph so that weight gradients are nodes of their own.
#
# - `convolution_backward` becomes one call for the input and one for the weights.
#   (Linear layers have two products as they are, and an embedding's input wants no
#   gradient.)
# - A weight that is used at every step in time has a sum of products as its gradient.
#   One product of all steps' tensors takes its place:
#
#       dy0ᵀ x0 + dy1ᵀ x1 + dy2ᵀ x2   ──▶   [dy0 dy1 dy2]ᵀ [x0 x1 x2]


_MM: Final = torch.ops.aten.mm.default
_ADD: Final = torch.ops.aten.add.Tensor
_T: Final = torch.ops.aten.t.default
_DETACH: Final = torch.ops.aten.detach.default
_CLONE: Final = torch.ops.aten.clone.default
_CAT: Final = torch.ops.aten.cat.default
_FEWEST: Final = 3  # products; tied weights have two, which belong to two layers


def rewrite(graph: fx.Graph, first: int, num_gradients: int) -> None:
    """Rewrite a graph of forward and backward in place.

    Args:
        graph: without side effects.
        first: the place of the first gradient among its results.
        num_gradients: the number of gradients.
    """
    for node in graph.find_nodes(op="call_function", target=_DETACH):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    _drop_double_transposes(graph)
    divide(graph)
    graph.eliminate_dead_code()
    for place in range(first, first + num_gradients):
        _join_products(graph, results_of_graph(graph)[place])
    _own_gradients(graph, range(first, first + num_gradients))
    graph.eliminate_dead_code()
    graph.lint()


def _drop_double_transposes(graph: fx.Graph) -> None:
    """Replace the transpose of a transpose: what autograd makes of each `x @ w.T`."""
    for node in graph.find_nodes(op="call_function", target=_T):
        inner = cast("fx.Node", node.args[0])
        if inner.target is _T:
            node.replace_all_uses_with(cast("fx.Node", inner.args[0]))
            graph.erase_node(node)


def _join_products(graph: fx.Graph, gradient: fx.Node) -> None:
    """Replace a sum of products by one product, if it has as many as a loop makes."""
    root = cast("fx.Node", gradient.args[0]) if gradient.target is _T else gradient
    products: list[fx.Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.target is _ADD and len(node.args) == 2 and not node.kwargs:
            waiting += cast("tuple[fx.Node, fx.Node]", node.args)
        elif node.target is _MM and len(node.users) == 1:
            products.append(node)
        else:
            return
    if len(products) < _FEWEST:
        return
    products.reverse()
    with graph.inserting_before(root):
        joined = [
            _called(graph, _CAT, [p.args[side] for p in products], 1 - side)
            for side in range(2)
        ]
        product = _called(graph, _MM, *joined)
    root.replace_all_uses_with(product)


def _own_gradients(graph: fx.Graph, places: Sequence[int]) -> None:
    """Copy gradients in memory that others read: an update may change its gradient."""
    results = list(results_of_graph(graph))
    nodes = [node for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    sharing: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        sharing[_storage(node)].append(node)
    storages = [_storage(results[place]) for place in places]
    for place, storage in zip(places, storages, strict=True):
        own = sharing[storage]
        is_read = any(node.op == "placeholder" or len(node.users) > 1 for node in own)
        has_holes = 0 in value_of(results[place]).stride()
        if is_read or has_holes or storages.count(storage) > 1:
            with graph.inserting_after(results[place]):
                results[place] = _called(graph, _CLONE, results[place])
    graph.output_node().args = (tuple(results),)


def _storage(node: fx.Node) -> int:
    return storage_of(value_of(node))


def _called(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Insert a call, with the tensor without memory that it makes."""
    node = graph.call_function(target, args)
    fakes = fx.map_arg(args, value_of)
    value: Tensor = target(*fakes)
    node.meta["val"] = value
    return node


T = TypeVar("T")
PLAIN_VALUES: Final = bool, int, float, complex, str, bytes, type(None)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of one training step, without the optimizer.

    Args:
        module: the graph, and its constants.
        parameters: the inputs that are weights, by name; tied weights are there once.
        buffers: the inputs that are buffers, by name.
        batch: the inputs that are tensors of the batch, in the order of its leaves.
        start: the input that is the gradient of the loss, 1.
        losses: every loss, by name; the first is trained.
        new_buffers: the new values of the buffers that the forward changes.
        gradients: by name of the weight; weights without a gradient are missing.
    """

    module: fx.GraphModule
    parameters: Mapping[str, fx.Node]
    buffers: Mapping[str, fx.Node]
    batch: tuple[fx.Node, ...]
    start: fx.Node
    losses: Mapping[str, fx.Node]
    new_buffers: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]

    @property
    def graph(self) -> fx.Graph:
        """The graph of operators."""
        return self.module.graph


class WeightChangeError(CaptureError):
    """The model changes its weights or its batch in forward."""


@contextmanager
def _as_capture_errors() -> Iterator[None]:
    """Raise what torch cannot trace as an error of ours, with the user's line."""
    try:
        yield
    except HocketError:
        raise
    except CannotCompileError as error:
        raise CaptureError(f"{error}, where a graph does the same each time") from error
    except Exception as error:
        kind, why = type(error).__name__, str(error).partition("\n")[0]
        text = f"torch cannot trace it: {kind}: {why}"
        if kind in {"DataDependentOutputException", "DynamicOutputShapeException"}:
            text = (
                f"the step's operators depend on the values of tensors ({error}), as "
                "in `if x.sum() > 0` or `x[mask]`: a graph does the same for all "
                "batches"
            )
        frames = traceback.extract_tb(error.__traceback__)
        raise CaptureError(f"{text}\n{source_line_of(frames)}") from error


@_as_capture_errors()
def trace_step(
    model: nn.Module, loss: LossFunction, batch: Any, *, fuses_lstm: bool = False
) -> StepGraph:
    """Trace one step of training; nothing of the model changes.

    Args:
        model: the model, in the mode (train or eval) to train in.
        loss: `loss(output, targets)`, a scalar or a dict of named ones.
        batch: a pair `(inputs, targets)`, of which only shapes and types count.
        fuses_lstm: see `RnnTracing`.

    Raises:
        CaptureError: the step's operators depend on values of tensors, the model
            changes its weights or attributes in forward, or draws random numbers in
            backward; or torch cannot trace it.
        ModelError: the loss has an unknown form, or no weight wants a gradient.
    """
    reached = reached_by(model)
    for path, what in {**reached.iterators, **reached.unseen}.items():
        raise CaptureError(f"the forward of {path or 'the model'} reads {what}")
    mode = make_mode()
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    leaves, spec = pytree.tree_flatten(batch)
    _check_leaves(leaves)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names, num_state = list(tensors), len(tensors)
    wanted = _wanted(tensors)
    loss_names: list[str] = []
    found: list[str] = []

    def with_state(flat: Sequence[Tensor], run: Callable[[], T]) -> T:
        # A backward that computes outputs again reads the module's weights, too.
        state = {f"model.{n}": x for n, x in zip(names, flat, strict=False)}
        made: T = torch.func.functional_call(_Scope(model), state, (run,))
        return made

    def forward(flat: Sequence[Tensor]) -> dict[str, Tensor]:
        own = list(leaves)
        for place, tensor in zip(places, flat[num_state:], strict=False):
            own[place] = tensor
        inputs, targets = pytree.tree_unflatten(own, spec)
        args, kwargs = call_arguments(inputs)
        with RnnTracing(fuses=fuses_lstm):
            return losses_of(loss, model(*args, **kwargs), targets)

    def both(*flat: Tensor) -> list[Tensor]:
        return with_state(flat, lambda: losses_and_gradients(flat))

    def losses_and_gradients(flat: Sequence[Tensor]) -> list[Tensor]:
        losses = forward(flat)
        loss_names[:] = losses
        weights = [flat[names.index(name)] for name in wanted]
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            losses[TOTAL], weights, flat[-1], allow_unused=True
        )
        pairs = [(n, g) for n, g in zip(wanted, grads, strict=True) if g is not None]
        found[:] = [name for name, _ in pairs]
        return [*(x.detach() for x in losses.values()), *(grad for _, grad in pairs)]

    every = (*tensors.values(), *(leaves[i] for i in places))
    fakes = [fake(mode, x, x.device) for x in every]
    # An RNN lists its weights once more, which functional_call exchanges.
    watched = [x for x in model.modules() if not isinstance(x, nn.RNNBase)]
    with check_traceable(watched):
        with on_fakes(mode):
            total = with_state(fakes, lambda: forward(fakes))[TOTAL]
        if not total.requires_grad:
            raise CaptureError(
                "the loss does not depend on any weight that wants a gradient: there "
                "is nothing to train"
            )
        start = empty(mode, (), total.dtype, total.device)
        module = _traced(both, [*fakes, start], mode)
    return _described(module, names, len(places), loss_names, found, tensors)


def _wanted(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that want a gradient.

    Raises:
        CaptureError: something is called with a gradient.
        ModelError: there are none.
    """
    wanted = [name for name, x in tensors.items() if x.requires_grad]
    if not wanted:
        raise ModelError(
            "no parameter of the model wants a gradient (requires_grad): there is "
            "nothing to train"
        )
    for name in wanted:
        if has_hooks(tensors[name]):
            raise CaptureError(f"{name} has a hook on its gradient")
    return wanted


def _check_leaves(leaves: Sequence[Any]) -> None:
    """Refuse what may hold tensors that a graph would keep as constants."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN_VALUES)):
            raise CaptureError(
                f"the batch holds a {type(leaf).__name__}: a graph takes tensors, and "
                "numbers and text that are always the same"
            )


class _Scope(nn.Module):
    """Holds a model while a function runs, so that its weights can be exchanged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the function."""
        with buffers_in_place(self.model):
            return run()


@contextmanager
def buffers_in_place(model: nn.Module) -> Iterator[None]:
    """Change buffers in place that modules assign again: a graph has one of each."""
    modules = [module._buffers for module in model.modules()]
    before = [(own, key, x) for own in modules for key, x in own.items()]
    yield
    for own, key, x in before:
        new = own[key]
        if new is not x and isinstance(new, Tensor) and isinstance(x, Tensor):
            with torch.no_grad():
                own[key] = x.copy_(new)


def _traced(
    function: Callable[..., list[Tensor]], fakes: Sequence[Tensor], mode: Any
) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = traced(function, fakes, mode)
    plain = [fake.detach() for fake in fakes]
    with torch.no_grad(), mode:
        return make_fx(torch.func.functionalize(module))(*plain)


def _described(
    module: fx.GraphModule,
    names: Sequence[str],
    num_leaves: int,
    loss_names: Sequence[str],
    found: Sequence[str],
    tensors: Mapping[str, Tensor],
) -> StepGraph:
    graph = module.graph
    for node in graph.find_nodes(op="get_attr"):
        held = getattr(module, str(node.target))
        if any(held is x for x in tensors.values()):
            raise CaptureError(
                "a weight is read in a way that tracing does not see, as through a "
                "reference that was kept outside of the module"
            )
        if not isinstance(held, Tensor):
            raise CaptureError(
                f"the step reads a {type(held).__name__} of the user's own, as draws "
                "from a torch.Generator do: use torch's own generator"
            )
        if held.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(held.shape)} outside of the model wants a "
                "gradient, which the step does not make: give loss= as a module that "
                "has it"
            )
    inputs = inputs_of_graph(graph)
    assigned = _assignments(graph, dict(zip(inputs, names, strict=False)), tensors)
    output = graph.output_node()
    output.args = ((*results_of_graph(graph), *assigned.values()),)
    rewrite(graph, len(loss_names), len(found))
    results = iter(results_of_graph(graph))
    state = dict(zip(names, inputs, strict=False))
    weights = {n for n, x in tensors.items() if isinstance(x, nn.Parameter)}
    return StepGraph(
        module,
        {n: x for n, x in state.items() if n in weights},
        {n: x for n, x in state.items() if n not in weights},
        tuple(inputs[len(names) : len(names) + num_leaves]),
        inputs[-1],
        losses={name: next(results) for name in loss_names},
        gradients={name: next(results) for name in found},
        new_buffers={name: next(results) for name in assigned},
    )


def _assignments(
    graph: fx.Graph, name_of: Mapping[fx.Node, str], tensors: Mapping[str, Tensor]
) -> dict[str, fx.Node]:
    """Remove the assignments to inputs at the graph's end; return the new values."""
    assigned = {}
    for old, new in taken_assignments(graph).items():
        name = name_of.get(old)
        if name is None or isinstance(tensors[name], nn.Parameter):
            what = "its batch" if name is None else f"its weight {name!r}"
            raise WeightChangeError(
                f"the model changes {what} in place in forward: compute a new tensor, "
                "and leave weights to the optimizer"
            )
        assigned[name] = new
    return assigned
