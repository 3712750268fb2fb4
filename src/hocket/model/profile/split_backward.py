"""Measures I and W of each layer, split as stages do it.

All I from the last layer to the first, then all W in the same order, as in a stage:

    F F F │ I I I │ W W W
            │   └── from here on, what was held for these W is released
            └────── here begins what each W needs: inputs and outputs' gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.model.profile.allocations import allocations
from hocket.model.profile.clock import Clock, clock_of, timed
from hocket.model.profile.passes import CallSpan, Given, forwards, with_zeros
from hocket.model.stages.splitter import Remainder, Splitter
from hocket.model.trace.local import local
from hocket.planner.work import HeldBytes


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
