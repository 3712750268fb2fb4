"""Forward through the pieces of a model, each measured by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from hocket.model.profile.clock import Clock
from hocket.model.stages.stage import StageModule

Finish: TypeAlias = Callable[[Any], Tensor]
Span: TypeAlias = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class PieceForward:
    """What the backward of one piece begins from.

    Args:
        received: what its forward was given by the piece before, cut off from it.
        outputs: of what it made, all that wants a gradient.
    """

    received: tuple[Tensor, ...]
    outputs: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        """Of what it received, all that wants a gradient."""
        return [x for x in self.received if x.requires_grad]


def forwards(
    pieces: Sequence[StageModule],
    inputs: Sequence[Any],
    finish: Finish,
    spans: Sequence[Span],
) -> list[PieceForward]:
    """Run every piece on what the one before made; what each backward begins from.

    Args:
        pieces: of the model, in order.
        inputs: the leaves of the batch.
        finish: of the model's output, run with the last piece.
        spans: of each piece: what it runs in.
    """
    live = []
    received: tuple[Tensor, ...] = ()
    for i, (piece, span) in enumerate(zip(pieces, spans, strict=True)):
        received = tuple(
            x.detach().requires_grad_(value.requires_grad)
            for x, value in zip(received, piece.inputs, strict=True)
        )
        own = [inputs[i] for i in piece.batch_inputs]
        with span():
            out = piece(*received, *own)
            if i + 1 == len(pieces):
                out = (finish(out),)
        live.append(PieceForward(received, [x for x in out if x.requires_grad]))
        received = out
    return live


@contextmanager
def timed(clock: Clock, seconds: list[float]) -> Iterator[None]:
    """Note how long it took."""
    begin = clock()
    yield
    seconds.append(clock() - begin)
