"""The interface of every correction for stale gradients, and its state.

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
from typing import TypedDict

from torch import Tensor


class CorrectionState(TypedDict):
    """A correction's state between updates, as a checkpoint holds it.

    Keys:
        num_updates: the updates that it has seen.
        kept: tensors like each parameter, the oldest first, by the uncut model's names.
    """

    num_updates: int
    kept: dict[str, list[Tensor]]


class Correction(ABC):
    """Wraps the updates of one stage whose gradients are stale."""

    @abstractmethod
    def step(self, step: Callable[[], object]) -> None:
        """Call the optimizer's step once, and correct what it reads or does."""

    @abstractmethod
    def predicted(self) -> dict[str, Tensor] | None:
        """Return the values that forwards read in place of the newest weights.

        Returns:
            Tensors of their own, by name, of every trained parameter of the stage; or
            None if they read the weights as they are. A pure function of the weights,
            the optimizer and this correction's state.
        """

    @abstractmethod
    def state_dict(self) -> CorrectionState:
        """Return the state for a checkpoint; the tensors are the live ones."""

    @abstractmethod
    def load_state_dict(self, state: CorrectionState) -> None:
        """Restore a state. Names that are not this stage's are ignored."""
