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
    """The W that an I leaves to be computed."""

    def finish(self) -> None:
        """Accumulate the weight gradients, and release the tensors held for them."""

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it holds the memory of any of these tensors."""

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds, each block of memory once."""


# Losses, or outputs' places in the graph.
Starts: TypeAlias = Sequence[Tensor] | Sequence[GradientEdge]

# The gradient of each leaf, None where no output depends on it; and W.
SplitGradients: TypeAlias = tuple[Sequence[Tensor | None], Remainder]


class Splitter(Protocol):
    """Splits the backwards of one stage.

    Attributes:
        module: runs the forwards whose backwards will be split.
    """

    module: StageModule

    def on(self) -> AbstractContextManager[object]:
        """Return the context for a forward whose backward will be split."""

    def input_gradients(
        self, starts: Starts, grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> SplitGradients:
        """Compute I: from the outputs back to the leaves.

        Args:
            starts: the losses or outputs at which it begins.
            grads: the gradient of each output.
            leaves: the leaves that need a gradient; maybe none.
        """


MakeSplitter: TypeAlias = Callable[[StageModule], Splitter]
