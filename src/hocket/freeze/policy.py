"""What a freezing policy is: pure functions from observations to a decision.

    state ─ observe(state, observation) ─▶ state ─ decide(state, observation) ─▶ 6
                                                           the first 6 layers freeze

A policy keeps nothing itself: its state goes in and comes out, so that a checkpoint can
hold it and a test needs no clock.

Decisions that cannot be followed are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from math import ceil
from numbers import Integral, Real
from operator import index
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar, runtime_checkable

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
        ConfigError: an argument is of another type, or out of its range.
    """

    every_steps: int | None = None
    layers: str | None = None

    def __post_init__(self) -> None:
        refuse(self.interval_faults())

    def interval_faults(self) -> list[str]:
        """Return a sentence for each argument that is not valid."""
        return interval_faults(self.every_steps, self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Interval):
    """A policy that knows in advance what freezes: it measures and keeps nothing."""

    measures: ClassVar[Measures] = Measures.NOTHING

    def begin(self) -> None:
        """Return no state."""

    def observe(self, state: None, seen: LayerObservation) -> None:
        """Return no state."""


def refuse(faults: Sequence[str]) -> None:
    """Raise a ConfigError with all faults, if there are any."""
    if faults:
        raise ConfigError("; ".join(faults))


def interval_faults(every_steps: object, layers: object) -> list[str]:
    """Return a sentence for each of the two that is not valid.

    Args:
        every_steps: the steps between decisions, if they are counted.
        layers: the pattern of the modules that count as layers, if there is one.
    """
    faults = []
    if every_steps is not None and not is_whole(every_steps, 1):
        faults.append(
            f"every_steps is {every_steps!r}: take 1, 2, ..., or leave it out to "
            "decide at the ends of epochs"
        )
    if layers is not None and not isinstance(layers, str):
        faults.append(f'layers is {layers!r}: give a pattern, as "encoder.layers.*"')
    return faults


def share_fault(name: str, value: object) -> list[str]:
    """Return a sentence if a value is no number between 0 and 1, both excluded."""
    if is_real(value) and 0.0 < value < 1.0:
        return []
    return [f"{name} is {value!r}: it must be above 0 and below 1, such as 0.2"]


def patience_fault(value: object) -> list[str]:
    """Return a sentence if a value is no positive number of equal proposals."""
    return [] if is_whole(value, 1) else [f"patience is {value!r}: take 1, 2, ..."]


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


# Freezes a fixed share of the layers that are left, again and again.
#
#     alpha 1/3, 12 layers     0 | 4 | 7 | 9 | 10 | 11 | 11 | 12
#
# Source: He et al., "PipeTransformer", arXiv:2102.03161 (ICML 2021), whose released
# code freezes by this bound alone.
@dataclass(frozen=True, slots=True)
class Alpha(Planned):
    """After e decisions, `ceil(L * (1 - (1 - alpha)**e))` of L layers are frozen.

    Source: He et al., "PipeTransformer", arXiv:2102.03161 (ICML 2021), whose released
    code freezes by this bound alone.

    Args:
        alpha: the share of the layers left that freezes at each decision.
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as "encoder.layers.*".

    Raises:
        ConfigError: a number is out of its range.

    >>> policy = Alpha(1 / 3)
    >>> [policy.decide(None, LayerObservation(e, e, 12, 0)) for e in range(1, 7)]
    [4, 7, 9, 10, 11, 11]
    """

    alpha: float

    def __post_init__(self) -> None:
        refuse([*self.interval_faults(), *share_fault("alpha", self.alpha)])

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Return the bound after as many decisions."""
        return num_frozen_after(self.alpha, seen.num_layers, seen.number)


def num_frozen_after(alpha: float, num_layers: int, num_decisions: int) -> int:
    """Return the bound of PipeTransformer, computed without rounding.

    Args:
        alpha: the share; taken as the simple fraction that it stands for.
        num_layers: layers that may freeze.
        num_decisions: decisions so far.
    """
    if num_layers * (1.0 - alpha) ** num_decisions < 0.5:
        return num_layers  # less than one is left: no power of large numbers
    # One of so many layers: a small share has a large denominator, and is not 0.
    share = 1 / (1 / Fraction(alpha)).limit_denominator(10_000)
    return ceil(num_layers * (1 - (1 - share) ** num_decisions))


# Freezes as many layers as a list says: a schedule made by hand.
#
# decisions         1  2  3  4  5
# {2: 6, 4: 8}      0  6  6  8  8
@dataclass(frozen=True, slots=True)
class Listed(Planned):
    """From the given decisions on, as many layers are frozen.

    Args:
        num_frozen: the layers that are frozen, by the number of the decision (from 1)
            that freezes them: the number of epochs that have ended, unless
            `every_steps` is given.
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as "encoder.layers.*".

    Raises:
        ConfigError: an argument is of another type, or out of its range.

    >>> policy = Listed({2: 6, 4: 8})
    >>> [policy.decide(None, LayerObservation(e, e, 12, 0)) for e in range(1, 6)]
    [0, 6, 6, 8, 8]
    """

    num_frozen: Mapping[int, int]

    def __post_init__(self) -> None:
        given: object = self.num_frozen
        if not isinstance(given, Mapping) or not given:
            fault = f"num_frozen is {given!r}: say when layers freeze, as {{2: 6}}"
            refuse([*self.interval_faults(), fault])
        wrong = [
            f"num_frozen has {number!r}: {layers!r}: decisions count from 1, layers "
            "from 0, as {2: 6}"
            for number, layers in self.num_frozen.items()
            if not (is_whole(number, 1) and is_whole(layers, 0))
        ]
        refuse([*self.interval_faults(), *wrong])

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Return what the list says, and no more layers than there are."""
        begun = [number for number in self.num_frozen if number <= seen.number]
        listed = self.num_frozen[max(begun)] if begun else 0
        return min(listed, seen.num_layers)


# Checks that an argument of any type is a number; a bool is none.
def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer, no bool, and at least `least`.

    >>> [is_whole(value, 1) for value in (2, 0, 1.0, "2", True)]
    [True, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= least


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number (int, float, Fraction, NaN), no bool.

    >>> [is_real(value) for value in (2, 0.5, "0.5", True)]
    [True, True, False, False]
    """
    return not isinstance(value, bool) and isinstance(value, Real)


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
