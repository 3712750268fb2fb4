"""Asks a policy while training runs, and refuses decisions that cannot be followed."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import Any

from hocket.errors import ConfigError
from hocket.freeze.policy import LayerObservation, Policy


@dataclass(slots=True)
class Decider:
    """A policy with its state, as rank 0 keeps them.

    Args:
        policy: what decides.
        num_layers: layers that may freeze.

    Attributes:
        num_frozen: layers that are frozen now.
        number: how often the policy was asked.
        state: the policy's state.
    """

    policy: Policy[Any]
    num_layers: int
    num_frozen: int = 0
    number: int = 0
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.policy.begin()

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
            ConfigError: it decides on more layers than there are, or fewer than none,
                or on what is no whole number; or its state is no plain value.
        """
        self.number += 1
        seen = LayerObservation(
            self.number, step, self.num_layers, self.num_frozen, learning_rate, measured
        )
        self.state = self.policy.observe(self.state, seen)
        decided = self.policy.decide(self.state, seen)
        name = type(self.policy).__name__
        if odd := _odd_kind(self.state):
            raise ConfigError(
                f"the state of {name} holds a {odd} after step {step}, which a "
                "checkpoint cannot hold: keep None, numbers, words and tuples of them"
            )
        try:
            num_frozen = index(decided)  # a plain int, also of a numpy integer
        except TypeError:
            raise ConfigError(
                f"{name} decides on {decided!r:.80} after step {step}, a "
                f"{type(decided).__name__} that is no whole number: decide on 0 to "
                f"{self.num_layers}"
            ) from None
        if not 0 <= num_frozen <= self.num_layers:
            raise ConfigError(
                f"{name} freezes {num_frozen} layers after step {step}, of "
                f"{self.num_layers}: decide on 0 to {self.num_layers}"
            )
        self.num_frozen = num_frozen
        return num_frozen


def _odd_kind(state: object) -> str:
    """Return the type of a part of a state that is no plain value, or nothing."""
    if isinstance(state, tuple):
        return next(filter(None, map(_odd_kind, state)), "")
    is_plain = state is None or isinstance(state, bool | int | float | str)
    return "" if is_plain else type(state).__name__
