"""What every correction of old gradients can do, and the words that choose one.

A stage of delay `d` computes the gradient of step `t` with the weights before the last
`d` updates, and applies it to the newest:

    reads    W(t-d)              ──┐  the gradient of step t
    applies        ...  W(t) ──────┴─▶ W(t+1)

A correction may change what is read (weight prediction) or what is applied (error
feedback, a discount of the learning rate). It acts only where `d` is above 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypedDict

from torch import Tensor

CorrectionName = Literal["none", "error-feedback", "weight-prediction", "lr-discount"]


class CorrectionState(TypedDict):
    """All that a correction remembers of earlier updates.

    Keys:
        num_updates: that it has seen.
        kept: tensors like each parameter, the oldest first, by the uncut model's names.
    """

    num_updates: int
    kept: dict[str, list[Tensor]]


class Correction(ABC):
    """Stands around the updates of one stage whose gradients are old."""

    @abstractmethod
    def step(self, step: Callable[[], object]) -> None:
        """Call the optimizer's step once, and correct what it reads or does."""

    @abstractmethod
    def predicted(self) -> dict[str, Tensor] | None:
        """What the forwards of the newest weights should read in their place.

        Returns:
            Tensors of their own, by name, of every trained parameter of the stage; or
            None where they should read the weights as they are. A function of the
            weights, the optimizer and this correction's state: asked twice, it says the
            same twice.
        """

    @abstractmethod
    def state_dict(self) -> CorrectionState:
        """What a checkpoint must hold; the tensors are the live ones."""

    @abstractmethod
    def load_state_dict(self, state: CorrectionState) -> None:
        """Go on from there. Names that are not this stage's are left aside."""
