"""Policies that look at gradients or activations: where they change no more."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from statistics import mean
from typing import ClassVar, NamedTuple, TypeAlias

from hocket.freeze.policy import (
    Interval,
    LayerObservation,
    Measures,
    after_patience,
    is_real,
    is_whole,
    patience_fault,
    refuse,
    share_fault,
)

Proposals: TypeAlias = tuple[int, ...]
Norms: TypeAlias = tuple[tuple[float, ...], Proposals]


@dataclass(frozen=True, slots=True)
class ArgminGradient(Interval):
    """Freezes up to the layer with the smallest gradient, at most a share at a time.

    Source: the rule of PipeTransformer (ICML 2021, section 3.1), which its released
    code does not run: `min(argmin_l ||g_l||, F + alpha * (L - F))` of L layers, of
    which F are frozen, layers counted from 1.

    Args:
        alpha: the largest share of the layers left that freezes at a decision.
        patience: as many decisions in a row must propose it; the smallest counts. 1 is
            the published rule, by which one noisy measurement may freeze layers.
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as "encoder.layers.*".

    Raises:
        ConfigError: a number is out of its range.
    """

    measures: ClassVar[Measures] = Measures.GRADIENTS

    alpha: float
    patience: int = 2

    def __post_init__(self) -> None:
        faults = [*self.interval_faults(), *share_fault("alpha", self.alpha)]
        refuse([*faults, *patience_fault(self.patience)])

    def begin(self) -> Proposals:
        """Return no proposals."""
        return ()

    def observe(self, state: Proposals, seen: LayerObservation) -> Proposals:
        """Return the proposals with the newest; none after norms that overflowed."""
        if not _are_finite(seen):
            return ()
        active = range(seen.num_frozen, seen.num_layers)
        if not active:
            return state
        smallest = min(active, key=lambda layer: seen.measured[layer])
        return (*state, smallest + 1)[-self.patience :]

    def decide(self, state: Proposals, seen: LayerObservation) -> int:
        """Return what the proposals agree on, within the share."""
        proposal = after_patience(state, self.patience, seen.num_frozen)
        most = ceil(self.alpha * (seen.num_layers - seen.num_frozen) - 1e-9)
        return min(proposal, seen.num_frozen + most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile(Interval):
    """Freezes the layers in front of the first whose gradient still changes.

    The change of a layer is `|before - now| / before` of the norms of its accumulated
    gradients. A layer still changes if its change is at least the percentile over the
    layers that are not frozen. The last layer never freezes.

    Source: AutoFreeze (Liu, Agarwal, Venkataraman 2021).

    Args:
        percentile: the percentile, from 0 to 100; between two changes it is
            interpolated.
        patience: as many decisions in a row must propose it; the smallest counts. 1 is
            the published rule, by which one noisy measurement may freeze layers.
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as "encoder.layers.*".

    Raises:
        ConfigError: a number is out of its range.
    """

    measures: ClassVar[Measures] = Measures.GRADIENTS

    percentile: float = 50.0
    patience: int = 2

    def __post_init__(self) -> None:
        faults = [*self.interval_faults(), *patience_fault(self.patience)]
        if not (is_real(self.percentile) and 0.0 <= self.percentile <= 100.0):
            faults.append(
                f"percentile is {self.percentile!r}: it must be from 0 to 100"
            )
        refuse(faults)

    def begin(self) -> Norms:
        """Return no norms and no proposals."""
        return (), ()

    def observe(self, state: Norms, seen: LayerObservation) -> Norms:
        """Return the newest norms, and the proposals with the newest.

        After norms that overflowed: the last ones that had not, and no proposals.
        """
        before, proposals = state
        if not _are_finite(seen):
            return before, ()
        if before and seen.num_frozen < seen.num_layers:
            proposals = (*proposals, self._proposal(before, seen))[-self.patience :]
        return seen.measured, proposals

    def decide(self, state: Norms, seen: LayerObservation) -> int:
        """Return what the proposals agree on."""
        return after_patience(state[1], self.patience, seen.num_frozen)

    def _proposal(self, before: tuple[float, ...], seen: LayerObservation) -> int:
        active = range(seen.num_frozen, seen.num_layers)
        changes = {i: _change(before[i], seen.measured[i]) for i in active}
        threshold = percentile_of([*changes.values()], self.percentile)
        return next(i for i, change in changes.items() if change >= threshold)


def percentile_of(values: list[float], percentile: float) -> float:
    """Return a percentile, interpolated between the two values beside it.

    >>> percentile_of([4.0, 1.0, 2.0, 3.0], 50)
    2.5
    """
    ordered = sorted(values)
    place = percentile / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    # No rounding may lift it above the largest value.
    between = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return min(between, ordered[above])


def _are_finite(seen: LayerObservation) -> bool:
    """Return whether the norms say how the layers learn: none is NaN or infinite."""
    return all(map(isfinite, seen.measured))


def _change(before: float, now: float) -> float:
    return abs(before - now) / before if before else 0.0


# Freezes the first layer whose activations move no more against a reference's.
#
#     plasticity of the first layer that trains
#       │\
#       │ \\__
#       │    \\______    flat: it freezes, and the next one is watched
#       └────────────▶ decisions
#
# When the learning rate has dropped to a tenth, all layers train again, as new minima
# come into reach.
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

    Source: Egeria (EuroSys 2023).
    """

    measures: ClassVar[Measures] = Measures.ACTIVATIONS

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
