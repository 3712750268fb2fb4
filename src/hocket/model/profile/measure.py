"""Measures a captured model layer by layer, on the device that it will train on.

Each layer runs as a stage of its own, forward from first to last and backward from last
to first, as in a pipeline. That adds a little at every seam, so the model is also run
whole, and the layers' times are scaled to add up to it:

    whole    F ├──────────────────────┤        B ├─────────────────────────────┤
    layers     ├────┤├──────┤├───────┤           ├───────┤├──────────┤├────────┤

The ratio of I and W in a layer's backward is measured in separate passes
(`split_backward.py`). The overhead of splitting is measured on the whole model,
alternating with whole backwards, and divided among layers by their W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.capture.capture import Captured
from hocket.model.profile.allocations import allocations
from hocket.model.profile.clock import clock_of
from hocket.model.profile.leaf_gradients import gradients_of
from hocket.model.profile.passes import (
    Finish,
    PieceForward,
    Span,
    detached,
    forwards,
    sum_of_outputs,
    timed,
)
from hocket.model.profile.profile import LayerProfile, Profile, conditions_of
from hocket.model.profile.split_backward import one_split_pass, split_backward_bytes
from hocket.model.stages.cut import cut
from hocket.model.stages.discard_saved_tensors import discard_saved_tensors, refuse
from hocket.model.stages.splitter import MakeSplitter
from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import tensors_in
from hocket.planner.work import HeldBytes

_MIN_PASSES = 5
_MAX_PASSES = 40
_BUDGET_S = 2.0  # for all passes of one kind

Column = list[float]  # seconds of one piece, one entry per pass


def profile(
    captured: Captured,
    leaves: Sequence[Any],
    *,
    device: torch.device,
    make_splitter: MakeSplitter,
    finish: Finish | None = None,
    targets: Any = None,
) -> Profile:
    """Measure every layer: medians over several passes, with their spread.

    The model, its weights, buffers and gradients, its modules' attributes, and random
    state are restored.

    Args:
        captured: the model.
        leaves: one microbatch, flattened as `(args, kwargs)`.
        device: the device to run on.
        make_splitter: makes the splitter of a piece, as in training.
        finish: makes a scalar of the model's output (the loss), which then counts as
            part of the last layer; the sum of all outputs when not given.
        targets: the targets that `finish` reads; like the batch's inputs, they are in
            memory anyway, and no layer keeps them.
    """
    num_layers = len(captured.layers)
    with restored_model(captured, device):
        pieces = [s.to(device).train() for s in cut(captured, range(1, num_layers))]
        whole = [s.to(device).train() for s in cut(captured, ())]
        split = [make_splitter(piece) for piece in pieces]
        whole_split = [make_splitter(piece) for piece in whole]
        end = sum_of_outputs if finish is None else finish
        inputs = [x.to(device) if isinstance(x, Tensor) else x for x in leaves]
        _accumulate_from_zero(whole)
        by_layer = _repeated(lambda: _one_pass(pieces, inputs, end, device))
        split_passes = _repeated(lambda: one_split_pass(split, inputs, end, device))
        at_once = _repeated(
            lambda: (
                *_one_pass(whole, inputs, end, device),
                *one_split_pass(whole_split, inputs, end, device),
            ),
            _MAX_PASSES // 2,
        )
        there = tensors_in([list(captured.state.tensors.values()), inputs, targets])
        kept = _kept_bytes(pieces, inputs, end, there)
        work = _work_bytes(pieces, inputs, end, device)
        held = split_backward_bytes(split, inputs, end, there, device)
    times = [
        _Times(*columns)
        for columns in zip(
            *_scaled(by_layer, at_once[:2]), *split_passes[1:], strict=True
        )
    ]
    layers = [
        _layer(captured, i, times[i], kept[i], work[i], held[i])
        for i in range(num_layers)
    ]
    split_s = _split_overhead_s(at_once[:2], at_once[2:])
    shared = _split_overhead_by_layer(layers, split_s)
    return Profile(tuple(shared), conditions_of(captured, device))


@dataclass(frozen=True, slots=True)
class _Times:
    """The seconds of one piece, one entry per pass."""

    forward: Column
    backward: Column
    input_grad: Column
    weight_grad: Column

    @property
    def input_share(self) -> float:
        """The share of I in I and W together."""
        input_s, weight_s = median(self.input_grad), median(self.weight_grad)
        both_s = input_s + weight_s
        return input_s / both_s if both_s else 1.0


@dataclass(slots=True)
class _Kept:
    """The bytes that a forward keeps for its backward: its own, and its input."""

    made_bytes: int = 0
    input_bytes: int = 0


def _layer(
    captured: Captured,
    i: int,
    times: _Times,
    kept: _Kept,
    work: tuple[int, int],
    held: HeldBytes,
) -> LayerProfile:
    layer = captured.layers[i]
    whole_s = median(times.backward)
    input_s = whole_s * times.input_share
    return LayerProfile(
        layer.name,
        median(times.forward),
        input_s,
        whole_s - input_s,
        _spread(times.forward),
        _spread(times.backward),
        kept.made_bytes,
        kept.input_bytes,
        sum(value.num_bytes for value in layer.received),
        sum(value.num_bytes for value in layer.received if value.requires_grad),
        *work,
        *astuple(held),
    )


def _split_overhead_s(whole: list[list[Column]], split: list[list[Column]]) -> float:
    """Return the overhead of split passes over whole ones, per pass and piece."""
    whole_s, split_pass_s = (
        [sum(times, 0.0) for times in zip(*(own for (own,) in kinds), strict=True)]
        for kinds in (whole, split)
    )
    longer_s = [a - b for a, b in zip(split_pass_s, whole_s, strict=True)]
    return median(longer_s)


def _split_overhead_by_layer(
    layers: Sequence[LayerProfile], split_s: float
) -> list[LayerProfile]:
    """Divide the overhead of splitting among the layers."""
    total_s = sum(layer.weight_grad_s for layer in layers)
    per_s = split_s / total_s if total_s else 0.0
    return [replace(x, split_s=per_s * x.weight_grad_s) for x in layers]


def _spread(seconds: Column) -> float:
    low, _, high = quantiles(seconds, n=4)
    return high - low


def _scaled(
    by_layer: Sequence[list[Column]], at_once: Sequence[list[Column]]
) -> Iterator[list[Column]]:
    """Scale the layers' forwards and backwards to add up to the whole model's."""
    for layers, (whole,) in zip(by_layer, at_once, strict=True):
        scale = median(whole) / sum(map(median, layers))
        yield [[seconds * scale for seconds in column] for column in layers]


def _repeated(
    one_pass: Callable[[], Sequence[Column]], most: int = _MAX_PASSES
) -> list[list[Column]]:
    """Run passes and return, for each kind of work, seconds by piece and pass.

    Args:
        one_pass: returns, for each kind of work, the seconds of each piece.
        most: the largest number of passes.
    """
    begin = perf_counter()
    rows: list[Sequence[Column]] = []
    while len(rows) < _MIN_PASSES + 2 or (
        perf_counter() - begin < _BUDGET_S / 2 and len(rows) < most
    ):
        rows.append(one_pass())
    kinds = zip(*rows[2:], strict=True)  # the first passes warm up
    return [[list(column) for column in zip(*kind, strict=True)] for kind in kinds]


def _one_pass(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    device: torch.device,
) -> tuple[Column, Column]:
    """Run forward through all pieces and back; return the seconds of each."""
    clock = clock_of(device)
    forward_s: Column = []
    backward_s: Column = []
    spans: list[Span] = [lambda: timed(clock, forward_s)] * len(pieces)
    live = forwards(pieces, inputs, finish, spans)
    _backwards(live, lambda: timed(clock, backward_s))
    return forward_s, backward_s[::-1]


def _backwards(live: list[PieceForward], span: Span) -> None:
    """Run every backward inside a span, from the last to the first."""
    grads: Sequence[Tensor] = [torch.ones_like(x) for x in live[-1].outputs]
    while live:
        own = live.pop()
        with span():
            grads = gradients_of(own.leaves, own.outputs, grads, only_inputs=False)


def _kept_bytes(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    there: Sequence[Tensor],
) -> list[_Kept]:
    """Return what each layer's forward keeps of new tensors, each piece once."""
    seen = {x.untyped_storage().data_ptr() for x in there}
    kept: list[_Kept] = []
    alive: list[Any] = []  # so that no address is used twice
    received: tuple[Tensor, ...] = ()
    for piece in pieces:
        received = detached(received, piece)
        from_before = {x.untyped_storage().data_ptr() for x in received}
        found = _Kept()
        with _found_in(found, seen, from_before, alive):
            out = piece(*received, *(inputs[i] for i in piece.batch_inputs))
            if piece is pieces[-1]:
                out = (finish(out),)
        kept.append(found)
        alive += [received, out]
        received = out
    alive.clear()  # the graph refers to its watcher, which refers to this list
    return kept


def _work_bytes(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    device: torch.device,
) -> list[tuple[int, int]]:
    """Return the most that each layer's forward and backward allocate."""
    num = len(pieces)
    with allocations(device) as forward, discard_saved_tensors():
        forwards(pieces, inputs, finish, [forward.span] * num)
    with allocations(device) as backward:
        live = forwards(pieces, inputs, finish, [nullcontext] * num)
        _backwards(live, backward.span)
    return list(zip(forward.peaks, backward.peaks[::-1], strict=True))


@contextmanager
def _found_in(
    kept: _Kept, seen: set[int], from_before: set[int], alive: list[Any]
) -> Iterator[None]:
    """Record what autograd saves in the block and was not seen before.

    The graph does not refer to the record: a cycle through it would never be freed.
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


def _accumulate_from_zero(stages: Sequence[StageModule]) -> None:
    """Set gradients to zero, so that every microbatch adds to existing ones."""
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


@contextmanager
def restored_model(captured: Captured, device: torch.device) -> Iterator[None]:
    """Restore whatever changes when the model runs.

    Weights, buffers and gradients, also where `to(device)` moved them, or a module has
    reassigned them; modes and other attributes of modules; random state.

    Args:
        captured: the model.
        device: the device that it runs on, whose random state is restored.
    """
    state = [*captured.state.tensors.values(), *captured.model.buffers()]
    tensors = {id(tensor): tensor for tensor in state}.values()
    trained = [(t, t.data, t.grad) for t in tensors if t.requires_grad]
    others = [(t, t.data, t.detach().clone()) for t in tensors if not t.requires_grad]
    drawing = [device] if device.type == "cuda" else []
    with preserve_attributes(captured.model), torch.random.fork_rng(drawing):
        try:
            yield
        finally:
            for tensor, data, grad in trained:
                tensor.data = data
                tensor.grad = grad
            for tensor, data, value in others:
                tensor.data = data
                tensor.copy_(value)
