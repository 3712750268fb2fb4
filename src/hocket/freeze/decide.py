"""Asks a policy while training runs, and refuses decisions that cannot be followed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hocket.errors import ConfigError
from hocket.freeze.policy import LayerObservation, Policy


@dataclass(slots=True)
class Decider:
    """A policy with its state, as rank 0 keeps them.

    Args:
        policy: what decides.
        num_layers: layers that may freeze.
        can_unfreeze: whether layers may train again.

    Attributes:
        num_frozen: layers that are frozen now.
    """

    policy: Policy[Any]
    num_layers: int
    can_unfreeze: bool = True
    num_frozen: int = 0
    _number: int = 0
    _state: Any = field(init=False)

    def __post_init__(self) -> None:
        self._state = self.policy.begin()

    def is_due(self, num_steps: int, *, epoch_ended: bool) -> bool:
        """Return whether the policy is to be asked now.

        Args:
            num_steps: steps that were trained.
            epoch_ended: whether the loader has just ended.
        """
        every = self.policy.every_steps
        return epoch_ended if every is None else num_steps % every == 0

    def ask(
        self, step: int, learning_rate: float = 0.0, measured: tuple[float, ...] = ()
    ) -> int:
        """Show the policy what was measured, and return how many layers freeze.

        Args:
            step: steps that were trained.
            learning_rate: the last update's.
            measured: see `LayerObservation`.

        Raises:
            ConfigError: it decides on more layers than there are, or fewer than none;
                or unfreezes some where that is not possible.
        """
        self._number += 1
        seen = LayerObservation(
            self._number,
            step,
            self.num_layers,
            self.num_frozen,
            learning_rate,
            measured,
        )
        self._state = self.policy.observe(self._state, seen)
        decided = self.policy.decide(self._state, seen)
        name = type(self.policy).__name__
        if not 0 <= decided <= self.num_layers:
            raise ConfigError(
                f"{name} freezes {decided} layers after step {step}, of "
                f"{self.num_layers}: decide on 0 to {self.num_layers}"
            )
        if decided < self.num_frozen and not self.can_unfreeze:
            raise ConfigError(
                f"{name} freezes {decided} layers after step {step}, and "
                f"{self.num_frozen} are frozen: layers cannot train again here, so "
                f"decide on {self.num_frozen} or more"
            )
        self.num_frozen = decided
        return decided
