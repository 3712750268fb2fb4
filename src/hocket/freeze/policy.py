"""What a freezing policy is: pure functions from observations to a decision.

    state ─ observe(state, observation) ─▶ state ─ decide(state, observation) ─▶ 6
                                                           the first 6 layers freeze

A policy keeps nothing itself: its state goes in and comes out, so that a checkpoint can
hold it and a test needs no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar, runtime_checkable

from hocket.errors import ConfigError

State = TypeVar("State")


class Measures(Enum):
    """What a policy wants measured of each layer."""

    NOTHING = "nothing"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class LayerObservation:
    """What a policy sees when it is asked.

    Args:
        number: how often it was asked, from 1.
        step: steps that were trained.
        num_layers: layers that may freeze.
        num_frozen: those of them that are frozen, from the first on.
        learning_rate: the last update's.
        measured: what the policy measures of each layer, 0 for frozen ones: the
            1-norm of the sum of all gradients since the policy was last asked; or how
            far its activations are from a reference's. Empty if it measures nothing.
    """

    number: int
    step: int
    num_layers: int
    num_frozen: int
    learning_rate: float = 0.0
    measured: tuple[float, ...] = ()


@runtime_checkable
class Policy(Protocol[State]):
    """Decides how many layers are frozen. Implement it for a policy of your own."""

    @property
    def every_steps(self) -> int | None:
        """Steps between decisions; None: a decision at the end of each epoch."""

    @property
    def layers(self) -> str | None:
        """The modules that count as layers, as "encoder.layers.*"; None: found."""

    @property
    def measures(self) -> Measures:
        """What it wants measured."""

    def begin(self) -> State:
        """Return the state before the first observation: tuples, numbers, None.

        Out of a checkpoint, named tuples come back as plain ones.
        """

    def observe(self, state: State, seen: LayerObservation) -> State:
        """Return the state with an observation in it."""

    def decide(self, state: State, seen: LayerObservation) -> int:
        """Return how many layers are frozen from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """When a policy is asked, and of which layers.

    Args:
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as a pattern such as
            "encoder.layers.*"; the children of the list of blocks that holds most
            parameters when not given.

    Raises:
        ConfigError: a number is out of its range.
    """

    every_steps: int | None = None
    layers: str | None = None

    def __post_init__(self) -> None:
        refuse(self.interval_faults())

    def interval_faults(self) -> list[str]:
        """Return a sentence if the interval is not valid."""
        if self.every_steps is not None and self.every_steps < 1:
            return [
                f"every_steps is {self.every_steps}: take 1 or more, or leave it out "
                "to decide at the ends of epochs"
            ]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Interval):
    """A policy that knows in advance what freezes: it measures and keeps nothing."""

    @property
    def measures(self) -> Measures:
        """Nothing."""
        return Measures.NOTHING

    def begin(self) -> None:
        """Return no state."""

    def observe(self, state: None, seen: LayerObservation) -> None:
        """Return no state."""


def refuse(faults: Sequence[str]) -> None:
    """Raise a ConfigError with all faults, if there are any."""
    if faults:
        raise ConfigError("; ".join(faults))


def share_fault(name: str, value: float) -> list[str]:
    """Return a sentence if a number is not between 0 and 1, both excluded."""
    if 0.0 < value < 1.0:
        return []
    return [f"{name} is {value}: it must be above 0 and below 1"]


def patience_fault(value: int) -> list[str]:
    """Return a sentence if a number of equal proposals is not positive."""
    return [] if value >= 1 else [f"patience is {value}: take 1 or more"]


def after_patience(proposals: Sequence[int], patience: int, num_frozen: int) -> int:
    """Return what the last few proposals agree on: the smallest of them.

    One noisy measurement freezes nothing: frozen layers do not come back.

    >>> after_patience((3, 5, 4), patience=2, num_frozen=1)
    4
    >>> after_patience((5,), patience=2, num_frozen=1)
    1
    """
    last = proposals[-patience:]
    return max(num_frozen, min(last)) if len(last) == patience else num_frozen
