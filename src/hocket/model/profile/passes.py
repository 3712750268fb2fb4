"""Runs the forward of each piece of a model, measured separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hocket.model.profile.clock import Clock
from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import tensors_in

Finish: TypeAlias = Callable[[Any], Tensor]
Span: TypeAlias = Callable[[], AbstractContextManager[object]]


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


def forwards(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    spans: Sequence[Span],
) -> list[PieceForward]:
    """Run every piece on the outputs of the one before; return each result.

    Args:
        pieces: the model's pieces, in order.
        inputs: the batch's leaves.
        finish: the loss of the model's output, run with the last piece.
        spans: the context that each piece runs in.
    """
    live = []
    received: tuple[Tensor, ...] = ()
    for i, (piece, span) in enumerate(zip(pieces, spans, strict=True)):
        received = detached(received, piece)
        own = [inputs[i] for i in piece.batch_inputs]
        with span():
            out = piece(*received, *own)
            if i + 1 == len(pieces):
                out = (finish(out),)
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


@contextmanager
def timed(clock: Clock, seconds: list[float]) -> Iterator[None]:
    """Append the block's seconds."""
    begin = clock()
    yield
    seconds.append(clock() - begin)
