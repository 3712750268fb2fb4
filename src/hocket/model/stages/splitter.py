"""The interface that splits a stage's backward into I and W.

    forward ──▶ I: gradients of what was received ──▶ Remainder ──▶ W

How it is done is `hocket.run.stage.split`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

from hocket.model.stages.stage import StageModule


class Remainder(Protocol):
    """W: what I leaves to be computed."""

    def finish(self) -> None:
        """Add up the weight gradients, and release what was held for them."""

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it holds on to the memory of any of them."""

    @property
    def num_bytes(self) -> int:
        """All that it holds, each block of memory once."""


# Losses, or outputs' places in the graph.
Starts: TypeAlias = Sequence[Tensor] | Sequence[GradientEdge]

# Of the leaves, None where nothing depends on one; and what is left for W.
Halves: TypeAlias = tuple[Sequence[Tensor | None], Remainder]


class Splitter(Protocol):
    """Splits the backwards of one stage.

    Attributes:
        module: runs the forwards whose backwards will be split.
    """

    module: StageModule

    def on(self) -> AbstractContextManager[object]:
        """What such a forward runs in."""

    def input_gradients(
        self,
        starts: Starts,
        grads: Sequence[Tensor],
        leaves: Sequence[Tensor],
    ) -> Halves:
        """I: from the outputs back to the leaves.

        Args:
            starts: where it begins.
            grads: the gradient of each output.
            leaves: the leaves that want a gradient; maybe none.
        """


MakeSplitter: TypeAlias = Callable[[StageModule], Splitter]
