r"""Freezes the first layer whose activations move no more against a reference's.

    plasticity of the first layer that trains
      │\
      │ \\__
      │    \\______    flat: it freezes, and the next one is watched
      └────────────▶ decisions

Source: Egeria (EuroSys 2023). When the learning rate has dropped to a tenth, all layers
train again, as new minima come into reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import mean
from typing import NamedTuple

from hocket.freeze.policy import (
    Interval,
    LayerObservation,
    Measures,
    is_real,
    is_whole,
    patience_fault,
    refuse,
    share_fault,
)


class Watch(NamedTuple):
    """What is known of the first layer that trains.

    Args:
        values: its plasticity at the last decisions, the newest last.
        steepest: the steepest slope that it had.
        num_flat: decisions in a row at which it was flat.
        rate: the learning rate at which the first layer froze; 0 if none did.
        last_rate: the learning rate at the last decision.
        num_frozen: layers frozen.
    """

    values: tuple[float, ...] = ()
    steepest: float = 0.0
    num_flat: int = 0
    rate: float = 0.0
    last_rate: float = 0.0
    num_frozen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plasticity(Interval):
    """Freezes one layer when its plasticity is flat; unfreezes all for a lower rate.

    Args:
        window: the plasticities to which a line is fitted.
        tolerance: it is flat if the line's slope is at most this share of the steepest
            that the layer had.
        patience: decisions in a row at which it must be flat.
        unfreeze_at: all layers train again when the learning rate has dropped to this
            share of what it was when the first of them froze; None: never.
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as "encoder.layers.*".

    Raises:
        ConfigError: an argument is of another type, or out of its range.
    """

    window: int = 4
    tolerance: float = 0.2
    patience: int = 2
    unfreeze_at: float | None = 0.1

    def __post_init__(self) -> None:
        faults = [*self.interval_faults(), *patience_fault(self.patience)]
        if not is_whole(self.window, 2):
            faults.append(f"window is {self.window!r}: a line needs 2, 3, ... values")
        if not (is_real(self.tolerance) and self.tolerance > 0.0):
            faults.append(f"tolerance is {self.tolerance!r}: it must be above 0")
        if self.unfreeze_at is not None:
            faults += share_fault("unfreeze_at", self.unfreeze_at)
        refuse(faults)

    @property
    def measures(self) -> Measures:
        """It measures activations."""
        return Measures.ACTIVATIONS

    def begin(self) -> Watch:
        """Return a watch of the first layer."""
        return Watch()

    def observe(self, state: Watch, seen: LayerObservation) -> Watch:
        """Return the watch with the newest plasticity, or one of the next layer."""
        state = Watch(*state)  # a plain tuple out of a checkpoint
        if self._rate_dropped(state, seen):
            return Watch()
        if seen.num_frozen != state.num_frozen:
            rate = state.rate or state.last_rate
            state = Watch(rate=rate, num_frozen=seen.num_frozen)
        state = state._replace(last_rate=seen.learning_rate)
        if seen.num_frozen >= seen.num_layers - 1:
            return state
        newest = seen.measured[seen.num_frozen]
        if not isfinite(newest):  # says nothing about how the layer learns
            return state._replace(values=(), num_flat=0)
        values = (*state.values, newest)[-self.window :]
        if len(values) < self.window:
            return state._replace(values=values)
        steep = abs(slope_of(values))
        steepest = max(state.steepest, steep)
        is_flat = steep <= self.tolerance * steepest and steep < steepest
        num_flat = state.num_flat + 1 if is_flat or not steepest else 0
        return state._replace(values=values, steepest=steepest, num_flat=num_flat)

    def decide(self, state: Watch, seen: LayerObservation) -> int:
        """Return one layer more if the first that trains is flat; 0 to unfreeze."""
        state = Watch(*state)
        if state.num_frozen != seen.num_frozen:
            return 0
        return seen.num_frozen + (state.num_flat >= self.patience)

    def _rate_dropped(self, state: Watch, seen: LayerObservation) -> bool:
        if self.unfreeze_at is None or not seen.num_frozen or not state.rate:
            return False
        return seen.learning_rate <= self.unfreeze_at * state.rate * (1 + 1e-9)


def slope_of(values: tuple[float, ...]) -> float:
    """Return the slope of the line with the least squares through equal steps.

    >>> slope_of((1.0, 3.0, 5.0))
    2.0
    """
    middle, level = (len(values) - 1) / 2, mean(values)
    rise = sum((i - middle) * (value - level) for i, value in enumerate(values))
    return rise / sum((i - middle) ** 2 for i in range(len(values)))
