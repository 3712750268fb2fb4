"""Cut a model that was captured again where it was cut before.

    before   embed  a  b | c  head        stage 1 begins with c
    now      embed  a  | c  d  head       as it does now; the weights of b stay where
                                          they are, and those of d must be there

The model's code may make other calls now, and a batch may be of another form. What was
made for the first cut stays: weights and their optimizers, and channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.capture.captured import (
    Captured,
    partners,
    used_in_both,
    with_module,
    with_starts,
)
from hocket.model.stages.cut import check_as_is, names_in_stages
from hocket.model.stages.outline import on_tensors
from hocket.model.stages.routes import Flows, routes
from hocket.model.trace.example import is_number
from hocket.model.trace.flow import TraceFlow
from hocket.model.trace.value import SentTensor

Values: TypeAlias = Mapping[Any, Any]  # of inputs by place, of attributes by name

_op: Final = torch.ops.aten
_SUMS: Final = (_op.add.Tensor, _op.sub.Tensor, _op.rsub.Scalar)
_OF_FLOATS: Final = (*_SUMS, _op.mul.Tensor, _op.neg.default)
WAY_OUT: Final = (
    "Put what depends on it into a submodule, or cut elsewhere (cut=[...], or fewer "
    "stages)"
)


class Placed(NamedTuple):
    """A captured model, and where its stages begin.

    Args:
        captured: the model, without values.
        boundaries: the layers at which stages 1, 2, ... begin.
    """

    captured: Captured
    boundaries: Sequence[int]


def placed_again(found: Captured, before: Placed, flows: Flows) -> Placed:
    """Return a model that was captured again, without values, cut as it was before.

    Args:
        found: the model as it is captured now.
        before: the same model, as it was.
        flows: see `hocket.model.stages.cut.cut`.

    Raises:
        ModelError: a stage would begin at another place, use weights of another one,
            or exchange other values with it; or a module is cut apart that must run as
            it is.
    """
    old, boundaries = before
    # Of batches of other lengths, other shapes cross.
    is_same_form = found.example.form.lengths == old.example.form.lengths
    names = names_in_stages(old, boundaries)
    if calls_alike(found, old):
        placed = with_starts(found, old.starts)
        placed = replace(placed, own_starts=old.own_starts)
    else:
        begins = _begins(found, old, boundaries)
        boundaries = range(1, len(begins))
        used = used_in_both(found.training, found.evaluation, begins)
        for stage, (own, known) in enumerate(zip(used, names, strict=True)):
            if other := sorted(own - known):
                raise ModelError(
                    f"stage {stage} would compute with {other[0]}, whose weights and "
                    f"optimizer are in another stage. {WAY_OUT}"
                )
        placed = with_starts(found, begins, names)
        seeds = _moved(found, old, old.own_starts)  # by which layers draw, as before
        placed = replace(placed, own_starts=tuple(seeds))
    for name, part in old.beside.items():
        placed = with_module(placed, name, part)
    placed = replace(placed, as_is=old.as_is | found.as_is)
    check_as_is(placed, boundaries, flows)
    if names_in_stages(placed, boundaries) != names:
        raise ModelError(f"a stage would have weights of another one. {WAY_OUT}")
    if _messages(placed, boundaries, flows, has_shapes=is_same_form) != _messages(
        old, before.boundaries, flows, has_shapes=is_same_form
    ):
        raise ModelError(
            "the code of a module that is cut apart makes other calls now, between "
            f"which other tensors cross. {WAY_OUT}"
        )
    return Placed(on_tensors(placed, {}, live=nn.Module()), boundaries)


def calls_alike(
    found: Captured, old: Captured, *, but_numbers: Values | None = None
) -> bool:
    """Whether two captures make the same calls, which return the same shapes and types.

    Args:
        found: a capture.
        old: another one of the same model.
        but_numbers: attributes and their values: the first may compute with numbers
            besides, where the other one has what they are for these and its inputs.
    """
    values = enumerate(old.example.form.values)
    at: dict[Any, Any] = {i: x[-1] for i, x in values if x}
    at |= but_numbers or {}

    def calls(captured: Captured) -> list[tuple[Any, ...]] | None:
        listed: list[tuple[Any, ...]] = []
        for flow in (captured.training, captured.evaluation):
            path_of, facts, nodes = flow.trace.path_of, flow.facts, flow.compute
            if but_numbers is not None:
                numbers = _numbers(captured, flow, at)
                if _takes_any(flow, numbers):  # a module would get a tensor for a float
                    return None
                # With a tensor in place of a number, some operators round differently.
                nodes = tuple(x for x in flow.trace.calls if x not in numbers)
                listed += [(str(x.target), *_constants(x, numbers)) for x in nodes]
            listed += [(path_of(x), facts[x].structure) for x in nodes]
        return listed

    own = calls(found)
    return own is not None and own == calls(old)


def _numbers(captured: Captured, flow: TraceFlow, at: Values) -> dict[fx.Node, Tensor]:
    """Return the nodes of numbers: tensors of no dimensions, and what is made of them.

    Of them a graph computes what Python does with floats.

    Args:
        captured: the model.
        flow: one of its modes.
        at: what values of inputs and attributes they are computed of; else of any.
    """
    trace, leaves = flow.trace, captured.example.leaves
    keys = {node: i for node, i in trace.leaf_of.items() if is_number(leaves[i])}
    gets = (x for x in trace.graph.nodes if x.op == "get_attr" and x.target in at)
    keys |= {node: str(node.target) for node in gets}
    values = {node: float(at.get(key, 0.5)) for node, key in keys.items()}
    found = {node: torch.tensor(x, dtype=torch.float64) for node, x in values.items()}
    for node in trace.calls:
        inputs = {*node.all_input_nodes}
        if inputs and inputs <= found.keys() and _is_as_of_floats(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            call: Any = node.target
            found[node] = call(*args, **kwargs)
    return found


def _is_as_of_floats(node: fx.Node) -> bool:
    """Whether a call computes what Python does, for all numbers.

    Python refuses to divide by zero. What `torch.tensor(number)` makes, has another
    type than a copy of the tensor.
    """
    by = [*node.args, None][1]
    divides = node.target is _op.div.Tensor and not isinstance(by, fx.Node)
    is_power = node.target is _op.pow.Tensor_Scalar and by in (2, 3)
    return divides or is_power or node.target in _OF_FLOATS


def _constants(node: fx.Node, numbers: Mapping[fx.Node, Tensor]) -> list[Any]:
    """Return what a call is given besides tensors, and None for each of these."""
    known = {x: numbers[x].item() for x in node.all_input_nodes if x in numbers}
    return pytree.tree_leaves(fx.map_arg((node.args, node.kwargs), known.get))


def _takes_any(flow: TraceFlow, numbers: Collection[fx.Node]) -> bool:
    """Whether a module that runs as it is, or may at some step, is called with some."""
    calls = (x for x in flow.trace.calls if x.op == "call_module")
    spans = (x for x in flow.trace.spans.values() if x.path)  # not the model itself
    given = chain((x.all_input_nodes for x in calls), (x.given for x in spans))
    return any(x in numbers for x in chain(*given) if isinstance(x, fx.Node))


def _moved(found: Captured, old: Captured, starts: Sequence[int]) -> list[int]:
    """Return where what began at some positions in training begins now.

    With the same call; if that is no longer made, behind the one before it.

    Args:
        found: a model that was captured again.
        old: as it was captured before.
        starts: positions in it, the first of all among them.
    """
    now = {node: i for i, node in enumerate(found.training.compute)}
    same = partners(old.training, found.training)
    calls = enumerate(old.training.compute)
    place = {i: now[same[node]] for i, node in calls if node in same}
    moved = [0]
    for start in starts[1:]:
        begin = place.get(start, place.get(start - 1, -1) + 1)
        moved.append(max(begin, moved[-1]))
    return moved


def _begins(
    found: Captured, old: Captured, boundaries: Sequence[int]
) -> list[tuple[int, int]]:
    """Return where the stages begin, in training and in evaluation.

    Raises:
        ModelError: nothing is left of a stage, or the model cannot be cut before it.
    """
    begins = [(0, 0)]
    moved = _moved(found, old, [0, *(old.starts[layer][0] for layer in boundaries)])
    for layer, begin in zip(boundaries, moved[1:], strict=True):
        if begin == begins[-1][0] or begin not in found.places:
            raise ModelError(
                "the code of a module that is cut apart makes other calls now, and "
                f"cannot be cut before {old.layers[layer].name} as it was. {WAY_OUT}"
            )
        begins.append((begin, found.places[begin]))
    return begins


def _messages(
    captured: Captured, boundaries: Sequence[int], flows: Flows, *, has_shapes: bool
) -> list[Any]:
    """Return the forms of what each stage sends to each other one."""
    values = captured.values

    def form(x: SentTensor) -> tuple[Any, ...]:
        shape = (x.shape, x.per_sample) if has_shapes else len(x.shape)
        return x.dtype, x.requires_grad, x.order, shape

    return [
        {target: [form(values[x]) for x in nodes] for target, nodes in sent.items()}
        for sent in routes(captured, (0, *boundaries), flows).sent
    ]
