"""Measure a captured model layer by layer, on the device that it will train on.

Each layer runs as a stage of its own, forward from first to last and backward from last
to first, as in a pipeline. That adds a little at every seam, so the model is also run
whole, and the layers' times are scaled to add up to it:

    whole    F ├──────────────────────┤        B ├─────────────────────────────┤
    layers     ├────┤├──────┤├───────┤           ├───────┤├──────────┤├────────┤
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.model.allocations import allocations
from hocket.model.capture import Captured
from hocket.model.clock import Clock, clock_of
from hocket.model.cut import cut
from hocket.model.leaf_gradients import gradients_of
from hocket.model.nothing_kept import nothing_kept, refuse
from hocket.model.per_sample import tensors_in
from hocket.model.profile import LayerProfile, Profile, conditions_of
from hocket.model.stage import StageModule

_MIN_PASSES = 5
_MAX_PASSES = 40
_BUDGET_S = 2.0  # of all passes of one kind

Finish = Callable[[Any], Tensor]
Span = Callable[[], AbstractContextManager[object]]
Live = tuple[list[Tensor], list[Tensor]]  # a backward's leaves, and its outputs


def profile(
    captured: Captured,
    leaves: Sequence[Any],
    *,
    device: torch.device,
    finish: Finish | None = None,
    targets: Any = None,
) -> Profile:
    """Measure every layer: medians over several passes, with their spread.

    The model, its buffers, gradients and random numbers are left as they were.

    Args:
        captured: the model.
        leaves: one microbatch, flattened as `(args, kwargs)`.
        device: where to run.
        finish: makes a scalar of the model's output (the loss), which then counts as
            part of the last layer; the sum of all outputs when not given.
        targets: what `finish` reads; like the batch's inputs, they are there anyway,
            and no layer keeps them.
    """
    num_layers = len(captured.layers)
    with as_it_was(captured):
        pieces = [s.to(device).train() for s in cut(captured, range(1, num_layers))]
        whole = [s.to(device).train() for s in cut(captured, ())]
        end = _sum_of_outputs if finish is None else finish
        inputs = [x.to(device) if isinstance(x, Tensor) else x for x in leaves]
        _begin_to_add_up(whole)
        by_layer = _passes(pieces, inputs, end, device)
        at_once = _passes(whole, inputs, end, device)
        there = tensors_in([list(captured.state.tensors.values()), inputs, targets])
        kept = _kept_bytes(pieces, inputs, end, there)
        work = _work_bytes(pieces, inputs, end, device)
    scale_f = median(at_once.forward[0]) / sum(map(median, by_layer.forward))
    scale_b = median(at_once.backward[0]) / sum(map(median, by_layer.backward))
    layers = [
        _layer(captured, i, by_layer, scale_f, scale_b, kept[i], work[i])
        for i in range(num_layers)
    ]
    return Profile(tuple(layers), conditions_of(captured, device))


@dataclass
class _Times:
    """Seconds of each piece, one entry per pass."""

    forward: list[list[float]] = field(default_factory=list)
    backward: list[list[float]] = field(default_factory=list)
    input_grad: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class _Kept:
    """Bytes that a forward keeps for its backward: what it made, and its input."""

    made_bytes: int = 0
    input_bytes: int = 0


def _layer(
    captured: Captured,
    i: int,
    times: _Times,
    scale_f: float,
    scale_b: float,
    kept: _Kept,
    work: tuple[int, int],
) -> LayerProfile:
    layer = captured.layers[i]
    whole_s = median(times.backward[i]) * scale_b
    input_s = min(whole_s, median(times.input_grad[i]) * scale_b)
    return LayerProfile(
        layer.name,
        median(times.forward[i]) * scale_f,
        input_s,
        whole_s - input_s,
        _spread(times.forward[i]),
        _spread(times.backward[i]),
        kept.made_bytes,
        kept.input_bytes,
        sum(value.num_bytes for value in layer.received),
        sum(value.num_bytes for value in layer.received if value.requires_grad),
        *work,
    )


def _spread(seconds: list[float]) -> float:
    low, _, high = quantiles(seconds, n=4)
    return high - low


def _passes(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    device: torch.device,
) -> _Times:
    """Whole passes, then passes in which only gradients of inputs are computed."""
    times = _Times()
    for only_inputs in (False, True):
        begin = perf_counter()
        rows: list[tuple[list[float], list[float]]] = []
        while len(rows) < _MIN_PASSES + 2 or (
            perf_counter() - begin < _BUDGET_S / 2 and len(rows) < _MAX_PASSES
        ):
            rows.append(_one_pass(pieces, inputs, finish, device, only_inputs))
        rows = rows[2:]  # the first passes warm up
        back = [list(column) for column in zip(*(b for _, b in rows), strict=True)]
        if only_inputs:
            times.input_grad = back
        else:
            times.backward = back
            forward = zip(*(f for f, _ in rows), strict=True)
            times.forward = [list(column) for column in forward]
    return times


def _one_pass(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    device: torch.device,
    only_inputs: bool,
) -> tuple[list[float], list[float]]:
    """Forward through all pieces and back; seconds of each."""
    clock = clock_of(device)
    forward_s: list[float] = []
    backward_s: list[float] = []
    live = _forwards(pieces, inputs, finish, lambda: _timed(clock, forward_s))
    _backwards(live, lambda: _timed(clock, backward_s), only_inputs=only_inputs)
    return forward_s, backward_s[::-1]


@contextmanager
def _timed(clock: Clock, seconds: list[float]) -> Iterator[None]:
    begin = clock()
    yield
    seconds.append(clock() - begin)


def _forwards(
    pieces: Sequence[StageModule], inputs: Sequence[Any], finish: Finish, span: Span
) -> list[Live]:
    """Every forward inside a span; what each backward begins from."""
    live = []
    received: tuple[Tensor, ...] = ()
    for piece in pieces:
        takes = [value.requires_grad for value in piece.received]
        received = tuple(
            x.detach().requires_grad_(t) for x, t in zip(received, takes, strict=True)
        )
        own = [inputs[i] for i in piece.batch_inputs]
        with span():
            out = piece(*received, *own)
            if piece is pieces[-1]:
                out = (finish(out),)
        leaves = [x for x, t in zip(received, takes, strict=True) if t]
        live.append((leaves, [x for x in out if x.requires_grad]))
        received = out
    return live


def _backwards(live: list[Live], span: Span, *, only_inputs: bool) -> None:
    """Every backward inside a span, from the last to the first."""
    grads: Sequence[Tensor] = [torch.ones_like(x) for x in live[-1][1]]
    while live:
        leaves, outputs = live.pop()
        with span():
            grads = gradients_of(leaves, outputs, grads, only_inputs=only_inputs)


def _kept_bytes(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    there: Sequence[Tensor],
) -> list[_Kept]:
    """What each layer's forward keeps of what was not there before, all of it once."""
    seen = {x.untyped_storage().data_ptr() for x in there}
    kept: list[_Kept] = []
    alive: list[Any] = []  # so that no address is used twice
    received: tuple[Tensor, ...] = ()
    for piece in pieces:
        received = tuple(
            x.detach().requires_grad_(value.requires_grad)
            for x, value in zip(received, piece.received, strict=True)
        )
        from_before = {x.untyped_storage().data_ptr() for x in received}
        found = _Kept()
        with _found_in(found, seen, from_before, alive):
            out = piece(*received, *(inputs[i] for i in piece.batch_inputs))
            if piece is pieces[-1]:
                out = (finish(out),)
        kept.append(found)
        alive += [received, out]
        received = out
    alive.clear()  # the graph knows who watched it, who knows this list
    return kept


def _work_bytes(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    device: torch.device,
) -> list[tuple[int, int]]:
    """What each layer's forward and backward hold at most while they run."""
    with allocations(device) as forward, nothing_kept():
        _forwards(pieces, inputs, finish, forward.span)
    with allocations(device) as backward:
        live = _forwards(pieces, inputs, finish, nullcontext)
        _backwards(live, backward.span, only_inputs=False)
    return list(zip(forward.peaks, backward.peaks[::-1], strict=True))


@contextmanager
def _found_in(
    kept: _Kept, seen: set[int], from_before: set[int], alive: list[Any]
) -> Iterator[None]:
    """Add up what autograd keeps in the meantime, and has not been seen before.

    The graph gets nothing of it: one that keeps a tensor which keeps the graph would
    never be freed.
    """

    def pack(tensor: Tensor) -> None:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            if address in from_before:
                kept.input_bytes += storage.nbytes()
            else:
                kept.made_bytes += storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, refuse):
        yield


def _begin_to_add_up(stages: Sequence[StageModule]) -> None:
    """Every microbatch but the first adds to gradients that are there."""
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def _sum_of_outputs(out: Any) -> Tensor:
    tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
    return torch.stack([x.sum() for x in tensors if x.requires_grad]).sum()


@contextmanager
def as_it_was(captured: Captured) -> Iterator[None]:
    """Put back buffers, gradients and random numbers."""
    tensors = captured.state.tensors.values()
    buffers = [(t, t.detach().clone()) for t in tensors if not t.requires_grad]
    grads = [(t, t.grad) for t in tensors if t.requires_grad]
    modes = {module: module.training for module in captured.model.modules()}
    generator = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(generator)
        for tensor, value in buffers:
            tensor.copy_(value)
        for tensor, grad in grads:
            tensor.grad = grad
        for module, mode in modes.items():
            module.training = mode
