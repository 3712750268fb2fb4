"""Freezes a fixed share of the layers that are left, again and again.

    alpha 1/3, 12 layers     0 | 4 | 7 | 9 | 10 | 11 | 11 | 12

Source: He et al., "PipeTransformer", arXiv:2102.03161 (ICML 2021), whose released code
freezes by this bound alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from hocket.freeze.policy import (
    LayerObservation,
    Planned,
    refuse,
    share_fault,
)


@dataclass(frozen=True, slots=True)
class Alpha(Planned):
    """After e decisions, `ceil(L * (1 - (1 - alpha)**e))` of L layers are frozen.

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
