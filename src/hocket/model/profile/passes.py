"""Runs forward and backward of each piece of a model, measured separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import tensors_in

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
