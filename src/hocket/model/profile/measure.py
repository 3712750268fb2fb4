"""Measures a captured model layer by layer, on the device that it will train on.

Each layer runs as a stage of its own, forward from first to last and backward from last
to first, as in a pipeline. That adds a little at every seam, so the model is also run
whole, and the layers' times are scaled to add up to it:

    whole    F ├──────────────────────┤        B ├─────────────────────────────┤
    layers     ├────┤├──────┤├───────┤           ├───────┤├──────────┤├────────┤

Layers that do the same work, such as a transformer's blocks, share all their seconds.
The ratio of I and W in a layer's backward is measured in separate passes
(`passes.py`). The overhead of splitting is measured on the whole model,
alternating with whole backwards, and divided among layers by their W.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.capture.capture import Captured
from hocket.model.profile.allocations import allocations
from hocket.model.profile.passes import (
    CallSpan,
    Finish,
    Given,
    PieceForward,
    detached,
    forwards,
    gradients_of,
    one_split_pass,
    split_backward_bytes,
    sum_of_outputs,
)
from hocket.model.profile.precision import (
    clock_of,
    is_precise,
    quartile_range,
    rounds,
    timed,
)
from hocket.model.profile.profile import LayerProfile, Profile, conditions_of
from hocket.model.stages.cut import cut
from hocket.model.stages.discard_saved_tensors import discard_saved_tensors, refuse
from hocket.model.stages.splitter import MakeSplitter
from hocket.model.stages.stage import StageModule
from hocket.model.trace.layers import Layer
from hocket.model.trace.local import is_sharded, local
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.state import gradient_type, overwrite
from hocket.planner.work import HeldBytes

_MIN_PASSES = 5
_MAX_PASSES = 40
_NUM_WARM = 2
_BUDGET_S = 2.0  # the passes of one kind may take half of it

Column = list[float]  # seconds of one piece, one entry per pass


@dataclass(slots=True)
class KeptBytes:
    """The bytes that a forward keeps for its backward.

    Args:
        made_bytes: kept tensors that the forward made.
        input_bytes: kept inputs.
    """

    made_bytes: int = 0
    input_bytes: int = 0


def kept_bytes(
    pieces: Sequence[StageModule], given: Given, resident: Sequence[Tensor]
) -> tuple[list[KeptBytes], Given]:
    """Measure the bytes that each layer's forward keeps for its backward.

    Each storage is counted once, for the first layer that keeps it. Of a layer whose
    forward runs a backward of its own nothing is counted: torch.func takes no hooks.

    Args:
        pieces: the layers, in order.
        given: what the first piece and the loss read.
        resident: tensors that are in memory anyway, such as weights; not counted.

    Returns:
        Each layer's bytes; and what the next layer reads, on the CPU.
    """
    before = [
        x for x, is_kept in zip(given.received, given.kept, strict=True) if is_kept
    ]
    seen = {local(x).untyped_storage().data_ptr() for x in (*resident, *before)}
    kept: list[KeptBytes] = []
    alive: list[Any] = []  # so that no address is used twice
    received: Sequence[Tensor] = given.received
    for piece in pieces:
        received = detached(received, piece)
        from_before = {x.untyped_storage().data_ptr() for x in received}
        found = KeptBytes()
        watched = _found_in(found, seen, from_before, alive)
        with nullcontext() if piece.runs_backward else watched:
            out = piece(*received, *(given.inputs[i] for i in piece.batch_inputs))
            if piece is pieces[-1] and given.finish is not None:
                out = (given.finish(out),)
        kept.append(found)
        alive += [received, out]
        received = out
    alive.clear()  # the graph keeps `pack`, which keeps this list: break the cycle
    were_kept = [x.untyped_storage().data_ptr() in seen for x in received]
    sent = [x.detach().cpu() for x in received]
    return kept, replace(given, received=sent, kept=were_kept)


@contextmanager
def _found_in(
    kept: KeptBytes, seen: set[int], from_before: set[int], alive: list[Any]
) -> Iterator[None]:
    """Record what autograd saves in the block and was not seen before.

    The graph keeps `pack`, and so `alive`: the caller must clear it, or the cycle is
    never freed.
    """

    def pack(tensor: Tensor) -> None:
        alive.append(tensor)
        storage = local(tensor).untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            if address in from_before:
                kept.input_bytes += storage.nbytes()
            else:
                kept.made_bytes += storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, refuse):
        yield


def profile(
    captured: Captured,
    leaves: Sequence[Any],
    *,
    device: torch.device,
    make_splitter: MakeSplitter,
    finish: Finish | None = None,
    targets: Any = None,
    most_bytes: int | None = None,
) -> Profile:
    """Measure every layer: medians over several passes, with their spread.

    The model, its weights, buffers and gradients, its modules' attributes, and random
    state are restored.

    Args:
        captured: the model.
        leaves: one microbatch on the device, flattened as `(args, kwargs)`.
        device: the device to run on.
        make_splitter: makes the splitter of a piece, as in training.
        finish: makes a scalar of the model's output (the loss), which then counts as
            part of the last layer; the sum of all outputs when not given.
        targets: the targets that `finish` reads; like the batch's inputs, they are in
            memory anyway, and no layer keeps them.
        most_bytes: the device's memory. Where the weights of all layers take more than
            half of it, or a pass does not fit, fewer layers are measured at once, and
            the others' weights stay where they are.

    Raises:
        torch.OutOfMemoryError: a layer does not fit by itself.
    """
    given = Given(leaves, sum_of_outputs if finish is None else finish)
    layers: list[LayerProfile] = []
    most_layers = num_layers = len(captured.layers)
    while len(layers) < num_layers:
        begin = len(layers)
        end = min(_end_of_group(captured, begin, most_bytes), begin + most_layers)
        group = LayerGroup(captured, begin, end, device, make_splitter, targets)
        with suppress(torch.OutOfMemoryError) if end - begin > 1 else nullcontext():
            with restored_model(captured, device):
                found, given = group.measure(given)
            layers += found
        if len(layers) == begin:
            most_layers = (end - begin) // 2
    return Profile(tuple(layers), conditions_of(captured, device))


def _end_of_group(captured: Captured, begin: int, most_bytes: int | None) -> int:
    """Return the layer behind those whose weights and gradients fit into the half."""
    if most_bytes is None:
        return len(captured.layers)
    seen: set[str] = set()
    for i, layer in enumerate(captured.layers[begin:], begin):
        seen.update((*layer.parameters, *layer.buffers))
        tensors = [captured.state.tensors[name] for name in seen]
        num_bytes = sum(x.nbytes * (2 if x.requires_grad else 1) for x in tensors)
        if num_bytes > most_bytes / 2 and i > begin:
            return i
    return len(captured.layers)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers that are on the device at once.

    Args:
        captured: the model.
        begin: the first layer.
        end: the layer behind the last one.
        device: the device.
        make_splitter: makes the splitter of a piece.
        targets: what the loss reads.
        share: the part of the time for all layers that these take.
    """

    captured: Captured
    begin: int
    end: int
    device: torch.device
    make_splitter: MakeSplitter
    targets: Any
    share: float = 1.0

    def measure(self, before: Given) -> tuple[list[LayerProfile], Given]:
        """Return each layer's profile, and what the layer behind them reads.

        Args:
            before: what the first of these layers and the loss read.
        """
        captured, device = self.captured, self.device
        num_layers = len(captured.layers)
        edges = [x for x in (self.begin, self.end) if 0 < x < num_layers]
        here = range(self.begin, self.end)
        own = cut(captured, range(1, num_layers), only=here)
        pieces = [piece.to(device).train() for piece in own]
        middle = cut(captured, edges, only=[min(self.begin, 1)])
        whole = [piece.to(device).train() for piece in middle]
        split = [self.make_splitter(piece) for piece in pieces]
        whole_split = [self.make_splitter(piece) for piece in whole]
        received = [x.to(device) for x in before.received]
        finish = before.finish if self.end == num_layers else None
        given = replace(before, received=received, finish=finish)
        _accumulate_from_zero(whole)
        alike = captured.alike[self.begin : self.end]
        alike[-1] = -1  # if it is the model's last one, the loss is a part of it
        # Several workers run passes over DTensors together, and all of them as often.
        parallel = any(map(is_sharded, captured.state.tensors.values()))
        most_s = 0.0 if parallel else _BUDGET_S / 2 * self.share
        by_layer, split_s = list[list[Column]](), list[list[Column]]()
        if len(pieces) > 1:  # before the whole: a piece may need what another keeps
            by_layer = _repeated(
                lambda: _one_pass(pieces, given, device), alike, most_s
            )
            # Only what is used below must be precise.
            split_s = _repeated(
                lambda: one_split_pass(split, given, device)[1:], alike, most_s
            )
        *at_once, split_f, split_i, split_w = _repeated(
            lambda: (
                *_one_pass(whole, given, device),
                *([sum(x)] for x in one_split_pass(whole_split, given, device)),
            ),
            [0],
            most_s,
            _MAX_PASSES // 2,
        )
        each = zip(*split_f, *split_i, *split_w, strict=True)
        whole_split_s = [[f + i + w for f, i, w in each]]
        if len(pieces) == 1:
            by_layer, split_s = at_once, [split_i, split_w]
        state = list(captured.state.tensors.values())
        there = tensors_in([state, given.inputs, self.targets])
        kept, sent = kept_bytes(pieces, given, there)
        work = _work_bytes(pieces, given, device)
        held = split_backward_bytes(split, given, there, device)
        columns = zip(*_scaled(by_layer, at_once), *split_s, strict=True)
        own_layers = captured.layers[self.begin : self.end]
        found = zip(own_layers, columns, kept, work, held, strict=True)
        layers = [_layer(*measured) for measured in found]
        layers = _with_split_overhead(layers, at_once, whole_split_s)
        return layers, replace(sent, finish=before.finish)


def _layer(
    layer: Layer,
    columns: Sequence[Column],
    kept: KeptBytes,
    work: tuple[int, int],
    held: HeldBytes,
) -> LayerProfile:
    """Return what was measured of a layer.

    Args:
        layer: the layer.
        columns: its seconds of the forward, of the whole backward, of I and of W, one
            entry per pass.
        kept: the bytes that its forward keeps.
        work: the most that its forward and its backward allocate.
        held: its memory with a split backward.
    """
    forward_s, whole_s, input_s, weight_s = map(median, columns)
    both_s = input_s + weight_s
    own_s = whole_s * (input_s / both_s if both_s else 1.0)
    received = layer.received
    return LayerProfile(
        layer.name,
        forward_s,
        own_s,
        whole_s - own_s,
        kept.made_bytes,
        kept.input_bytes,
        sum(value.num_bytes for value in received),
        sum(value.num_bytes for value in received if value.requires_grad),
        *work,
        split=held,
        forward_spread_s=quartile_range(columns[0]),
        backward_spread_s=quartile_range(columns[1]),
    )


def _with_split_overhead(
    layers: Sequence[LayerProfile], whole: list[list[Column]], split: list[Column]
) -> list[LayerProfile]:
    """Divide the overhead of split passes over whole ones among the layers.

    Args:
        layers: the layers.
        whole: the seconds of whole forwards and backwards, one entry per pass.
        split: the seconds of passes with a split backward, which alternated with them.
    """
    passes = zip(*split, *(column for (column,) in whole), strict=True)
    split_s = median(a - b - c for a, b, c in passes)
    total_s = sum(layer.weight_grad_s for layer in layers)
    per_s = split_s / total_s if total_s else 0.0
    return [replace(x, split_s=per_s * x.weight_grad_s) for x in layers]


def _scaled(
    by_layer: Sequence[list[Column]], at_once: Sequence[list[Column]]
) -> Iterator[list[Column]]:
    """Scale the layers' forwards and backwards to add up to the whole model's."""
    for layers, (whole,) in zip(by_layer, at_once, strict=True):
        scale = median(whole) / sum(map(median, layers))
        yield [[seconds * scale for seconds in column] for column in layers]


def _repeated(
    one_pass: Callable[[], Sequence[Column]],
    alike: Sequence[int],
    most_s: float,
    most: int = _MAX_PASSES,
) -> list[list[Column]]:
    """Run passes and return, for each kind of work, the seconds of each piece.

    Pieces that do the same work share their seconds. There are fewer passes where these
    differ little.

    Args:
        one_pass: returns, for each kind of work, the seconds of each piece.
        alike: a number for each piece, the same for the same work.
        most_s: no pass begins after so many seconds, but for the least.
        most: the largest number of passes.
    """
    rows: list[Sequence[Column]] = []

    def is_enough() -> bool:
        return all(map(is_precise, _by_kind(rows, alike)))

    limits = _MIN_PASSES, most - _NUM_WARM
    for counts in rounds(
        *limits, num_warm=_NUM_WARM, most_s=most_s, is_enough=is_enough
    ):
        row = one_pass()
        rows += [row] * counts
    return _by_kind(rows, alike)


def _by_kind(
    rows: Sequence[Sequence[Column]], alike: Sequence[int]
) -> list[list[Column]]:
    """Return, for each kind of work, the seconds of each piece and those like it."""
    kinds = []
    for kind in zip(*rows, strict=True):
        shared: defaultdict[int, Column] = defaultdict(list)
        for seconds in kind:
            for number, piece_s in zip(alike, seconds, strict=True):
                shared[number].append(piece_s)
        kinds.append([shared[number] for number in alike])
    return kinds


def _one_pass(
    pieces: Sequence[StageModule], given: Given, device: torch.device
) -> tuple[Column, Column]:
    """Run forward through all pieces and back; return the seconds of each."""
    clock = clock_of(device)
    forward_s, backward_s = Column(), Column()
    live = forwards(pieces, given, [lambda: timed(clock, forward_s)] * len(pieces))
    _backwards(live, lambda: timed(clock, backward_s))
    return forward_s, backward_s[::-1]


def _backwards(live: list[PieceForward], span: CallSpan) -> None:
    """Run every backward inside a span, from the last to the first."""
    grads: Sequence[Tensor] = [torch.ones_like(x) for x in live[-1].outputs]
    while live:
        own = live.pop()
        with span():
            grads = gradients_of(own.leaves, own.outputs, grads, only_inputs=False)


def _work_bytes(
    pieces: Sequence[StageModule], given: Given, device: torch.device
) -> list[tuple[int, int]]:
    """Return the most that each layer's forward and backward allocate."""
    num, keeps = len(pieces), any(piece.runs_backward for piece in pieces)
    with allocations(device) as forward, discard_saved_tensors(keeps=keeps):
        forwards(pieces, given, [forward.span] * num)
    with allocations(device) as backward:
        _backwards(forwards(pieces, given, [nullcontext] * num), backward.span)
    return list(zip(forward.peaks, backward.peaks[::-1], strict=True))


def _accumulate_from_zero(stages: Sequence[StageModule]) -> None:
    """Set gradients to zero, so that every microbatch adds to existing ones."""
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.requires_grad:
                wanted = gradient_type(parameter)
                parameter.grad = torch.zeros_like(parameter, dtype=wanted)


@contextmanager
def restored_model(
    captured: Captured,
    device: torch.device,
    stages: Sequence[nn.Module] = (),
    names: Collection[str] | None = None,
) -> Iterator[None]:
    """Restore whatever changes when the model runs.

    Weights, buffers and gradients, also where `to(device)` moved them, or a module has
    reassigned them; modes and other attributes of modules; random state.

    Args:
        captured: the model.
        device: the device that it runs on, whose random state is restored.
        stages: the model's stages that run on that device, if not all do: their modes
            are restored, and their buffers, which may not be the model's own.
        names: the first names of the tensors that are read, if not all are.
    """
    modules = nn.ModuleList([captured.model, *captured.beside.values(), *stages])
    every = captured.state.tensors
    state = [x for name, x in every.items() if names is None or name in names]
    if stages:
        run = nn.ModuleList(stages)
        own = {id(x) for x in (*run.parameters(), *run.buffers())}
        state = [x for x in state if id(x) in own] + [*run.buffers()]
    elif names is None:
        state += modules.buffers()
    tensors = {id(tensor): tensor for tensor in state}.values()
    trained = [(t, t.data, t.grad) for t in tensors if t.requires_grad]
    others = [(t, t.data, t.detach().clone()) for t in tensors if not t.requires_grad]
    drawing = [device] if device.type == "cuda" else []
    with preserve_attributes(modules), torch.random.fork_rng(drawing):
        try:
            yield
        finally:
            for tensor, data, grad in trained:
                tensor.data = data
                tensor.grad = grad
            for tensor, data, value in others:
                tensor.data = data
                overwrite(tensor, value)
