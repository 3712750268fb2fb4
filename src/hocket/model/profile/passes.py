"""Runs forward and backward of each piece of a model, measured separately.

A split backward runs all I from the last layer to the first, then all W in the same
order, as in a stage:

    F F F │ I I I │ W W W
            │   └── from here on, what was held for these W is released
            └────── here begins what each W needs: inputs and outputs' gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.model.profile.allocations import allocations
from hocket.model.profile.precision import Clock, clock_of, timed
from hocket.model.stages.splitter import Remainder, Splitter
from hocket.model.stages.stage import StageModule
from hocket.model.trace.local import local
from hocket.model.trace.per_sample import tensors_in
from hocket.planner.work import HeldBytes

Finish: TypeAlias = Callable[[Any], Tensor]
CallSpan: TypeAlias = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class PieceForward:
    """The result of a piece's forward, from which its backward starts.

    Args:
        received: the inputs from the piece before, detached.
        outputs: the outputs that want a gradient.
    """

    received: tuple[Tensor, ...]
    outputs: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        """The received inputs that want a gradient."""
        return [x for x in self.received if x.requires_grad]


@dataclass(frozen=True, slots=True)
class Given:
    """What consecutive pieces of a model read besides their weights.

    Args:
        inputs: the batch's leaves.
        finish: the loss of the model's output, run with the last piece; None if the
            model goes on behind these pieces.
        received: what the piece before them sends.
        kept: which of that an earlier piece keeps for its backward.
    """

    inputs: Sequence[Any]
    finish: Finish | None
    received: Sequence[Tensor] = ()
    kept: Sequence[bool] = ()


def forwards(
    pieces: Sequence[StageModule], given: Given, spans: Sequence[CallSpan]
) -> list[PieceForward]:
    """Run every piece on the outputs of the one before; return each result.

    Args:
        pieces: consecutive pieces of the model.
        given: what else they read.
        spans: the context that each piece runs in.
    """
    live = []
    received = given.received
    for i, (piece, span) in enumerate(zip(pieces, spans, strict=True)):
        received = detached(received, piece)
        own = [given.inputs[i] for i in piece.batch_inputs]
        with span():
            out = piece(*received, *own)
            if i + 1 == len(pieces) and given.finish is not None:
                out = (given.finish(out),)
        live.append(PieceForward(received, [x for x in out if x.requires_grad]))
        received = out
    return live


def detached(sent: Sequence[Tensor], piece: StageModule) -> tuple[Tensor, ...]:
    """Return what the piece before sent as a piece receives it: as leaves."""
    return tuple(
        x.detach().requires_grad_(value.requires_grad)
        for x, value in zip(sent, piece.inputs, strict=True)
    )


def sum_of_outputs(out: Any) -> Tensor:
    """Return a scalar of a model's output, where there is no loss."""
    return torch.stack([x.sum() for x in tensors_in(out) if x.requires_grad]).sum()


def gradients_of(
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    only_inputs: bool,
) -> Sequence[Tensor]:
    """Return gradients of the leaves; compute the weights' too unless `only_inputs`.

    Args:
        leaves: what the piece received.
        outputs: the piece's outputs.
        grads: the gradient of each output.
        only_inputs: whether to skip the weights' gradients.

    Returns:
        One gradient for each leaf, zeros if no output depends on it.
    """
    if not outputs or (only_inputs and not leaves):
        return [torch.zeros_like(x) for x in leaves]
    found: Sequence[Tensor | None]
    if only_inputs:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    else:
        torch.autograd.backward(outputs, grads)
        found = [x.grad for x in leaves]
    return with_zeros(leaves, found)


def with_zeros(
    leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the gradients of leaves, with zeros in place of None."""
    return [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(leaves, grads, strict=True)
    ]


def one_split_pass(
    splitters: Sequence[Splitter], given: Given, device: torch.device
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each layer's F, I and W."""
    clock = clock_of(device)
    forward_s: list[float] = []
    input_s: list[float] = []
    weight_s: list[float] = []
    spans = [partial(_timed_on, clock, forward_s, x) for x in splitters]
    begins, grads = _forwards(splitters, given, spans)
    lefts = _input_grads(splitters, begins, grads, lambda: timed(clock, input_s))
    _weight_grads(lefts, lambda: timed(clock, weight_s))
    return forward_s, input_s[::-1], weight_s[::-1]


@contextmanager
def _timed_on(clock: Clock, seconds: list[float], splitter: Splitter) -> Iterator[None]:
    """Time a forward whose backward will be split."""
    with timed(clock, seconds), splitter.on():
        yield


def split_backward_bytes(
    splitters: Sequence[Splitter],
    given: Given,
    there: Sequence[Tensor],
    device: torch.device,
) -> list[HeldBytes]:
    """Return what each layer holds, and the most that its I and W allocate.

    Args:
        splitters: each layer's splitter.
        given: what the first layer and the loss read.
        there: tensors that are in memory anyway.
        device: the device that it runs on.
    """
    held: list[tuple[int, int]] = []

    def look(left: Remainder, received: Sequence[Tensor]) -> None:
        held.append(_held(left, received, there))

    with allocations(device) as log:
        begins, grads = _forwards(splitters, given, [x.on for x in splitters])
        lefts = _input_grads(splitters, begins, grads, log.span, look)
        _weight_grads(lefts, log.span)
    num = len(splitters)
    first, second = log.peaks[:num], log.peaks[num:]
    return [
        HeldBytes(*own, of_input, of_weight)
        for own, of_input, of_weight in zip(held, first, second, strict=True)
    ][::-1]


@dataclass(frozen=True, slots=True)
class _SplitForward:
    """The result of a layer's forward, from which I starts.

    Args:
        received: the forward's inputs.
        starts: the outputs' places in the graph, so that the outputs need not stay.
    """

    received: tuple[Tensor, ...]
    starts: list[GradientEdge]


def _forwards(
    splitters: Sequence[Splitter], given: Given, spans: Sequence[CallSpan]
) -> tuple[list[_SplitForward], list[Tensor]]:
    """Return where each I starts, and the gradients that the last one gets."""
    pieces = [splitter.module for splitter in splitters]
    live = forwards(pieces, given, spans)
    grads = [torch.ones_like(x) for x in live[-1].outputs]
    begins = [
        _SplitForward(own.received, [get_gradient_edge(x) for x in own.outputs])
        for own in live
    ]
    return begins, grads


def _ignore(left: Remainder, received: Sequence[Tensor]) -> None:
    """Do nothing, when only time is measured."""


def _input_grads(
    splitters: Sequence[Splitter],
    begins: list[_SplitForward],
    grads: Sequence[Tensor],
    span: CallSpan,
    look: Callable[[Remainder, Sequence[Tensor]], None] = _ignore,
) -> list[Remainder]:
    """Run every I inside a span, from the last layer to the first; return each W."""
    lefts = []
    for splitter in reversed(splitters):
        own = begins.pop()
        leaves = [x for x in own.received if x.requires_grad]
        with span():
            found, left = splitter.input_gradients(own.starts, grads, leaves)
            grads = with_zeros(leaves, found)
        look(left, own.received)
        lefts.append(left)
    return lefts


def _weight_grads(lefts: Sequence[Remainder], span: CallSpan) -> None:
    for left in lefts:
        with span():
            left.finish()


def _held(
    left: Remainder, received: Sequence[Tensor], there: Sequence[Tensor]
) -> tuple[int, int]:
    """Return the bytes that W holds of the layer's outputs, and of its inputs."""
    known = _blocks_held(left, there)
    given = _blocks_held(left, received)
    given = {at: size for at, size in given.items() if at not in known}
    made = left.num_bytes - sum(known.values()) - sum(given.values())
    return made, sum(given.values())


def _blocks_held(left: Remainder, tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of each block of memory that W holds, by address."""
    if not tensors or not left.holds(tensors):
        return {}
    storages = [local(x).untyped_storage() for x in tensors if left.holds([x])]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
