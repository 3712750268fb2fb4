"""A model's costs at any number of samples: counted or measured.

The planner calls `layers(num_samples)` of either kind of costs:

    FLOPs, bytes  x  Hardware   ─▶ CountedCosts  ┐   (planner/counted.py)
    profiles at one or two sizes ─▶ MeasuredCosts ┴─▶ layers(num_samples)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol


@dataclass(frozen=True, slots=True)
class Weights:
    """One parameter or buffer, wherever it is used.

    Args:
        name: its first name in the uncut model; the same in all layers that share it.
        num_bytes: bytes of its values.
        gradient_bytes: bytes of its gradient; 0 if it is not trained.
        optimizer_bytes: bytes of the optimizer's state.
    """

    name: str
    num_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """A layer's memory with a split backward; see `LayerProfile`.

    Args:
        weight_grad_held_bytes: what it made that is held from I until W.
        held_input_bytes: what it received that is held from I until W.
        input_grad_work_bytes: the most that I allocates at once.
        weight_grad_work_bytes: the most that W allocates at once.
    """

    weight_grad_held_bytes: int
    held_input_bytes: int
    input_grad_work_bytes: int
    weight_grad_work_bytes: int


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer's costs per microbatch; `StageCost` is a sum of these.

    Args:
        name: the layer's name.
        forward_s: seconds of F.
        input_grad_s: seconds of I, as a part of the whole backward.
        weight_grad_s: seconds of W, as a part of the whole backward.
        activation_bytes: what the forward makes and keeps for the backward.
        kept_input_bytes: what it keeps of its input, if no earlier layer does.
        received_bytes: the message to a stage that begins with it.
        received_grad_bytes: the message back.
        forward_work_bytes: the most at once in a forward that keeps nothing.
        backward_work_bytes: the most at once in a backward, beyond what was kept.
        weights: the parameters and buffers that it uses.
        split: its memory with a split backward; None if unknown: then all that the
            forward kept is assumed to be held.
        split_s: the overhead of a split backward; may be negative within the noise.
    """

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    activation_bytes: int = 0
    kept_input_bytes: int = 0
    received_bytes: int = 0
    received_grad_bytes: int = 0
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    weights: tuple[Weights, ...] = ()
    split: HeldBytes | None = None
    split_s: float = 0.0

    @property
    def weight_grad_held_bytes(self) -> int:
        """What it made that is held from I until W."""
        split = self.split
        return split.weight_grad_held_bytes if split else self.activation_bytes

    @property
    def held_input_bytes(self) -> int:
        """What it received that is held from I until W."""
        return self.split.held_input_bytes if self.split else self.kept_input_bytes

    @property
    def input_grad_work_bytes(self) -> int:
        """The most that I allocates at once."""
        split = self.split
        return split.input_grad_work_bytes if split else self.backward_work_bytes

    @property
    def weight_grad_work_bytes(self) -> int:
        """The most that W allocates at once; 0 if unknown."""
        return self.split.weight_grad_work_bytes if self.split else 0

    @property
    def backward_s(self) -> float:
        """Seconds of I and W."""
        return self.input_grad_s + self.weight_grad_s


class ModelCosts(Protocol):
    """A model's layers, and their costs for any size of microbatch."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def how(self) -> str:
        """How the seconds were found, in a sentence for people."""

    @property
    def only_samples(self) -> int | None:
        """The only size of microbatch that the model runs with, if there is one."""

    @property
    def update_s_per_byte(self) -> float:
        """Seconds of the optimizer's step per byte of weights, gradients and state."""

    def layers(self, num_samples: int) -> tuple[LayerCost, ...]:
        """Return the layers' costs for microbatches of this size."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A number of bytes that is linear in the samples."""

    fixed: float
    per_sample: float

    def at(self, num_samples: int) -> int:
        """Return the bytes for this number of samples."""
        return max(0, round(self.fixed + self.per_sample * num_samples))

    @classmethod
    def through(cls, sizes: tuple[int, int], values: tuple[float, float]) -> Affine:
        """Return the line through two points; through the origin if they are one."""
        if sizes[0] == sizes[1]:
            return cls(0.0, values[0] / sizes[0])
        slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
        return cls(values[0] - slope * sizes[0], slope)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCosts:
    """Costs as measured, at one or two sizes of a microbatch.

    Args:
        name: the model's name.
        sizes: the two numbers of samples; the same twice if only one was measured.
        profiles: the layers' costs at each.
        update_s_per_byte: the measured seconds per byte of an update.
        device_name: the device that was measured.
        only_samples: see `ModelCosts`.
    """

    name: str
    sizes: tuple[int, int]
    profiles: tuple[Sequence[LayerCost], Sequence[LayerCost]]
    update_s_per_byte: float
    device_name: str
    only_samples: int | None = None

    @property
    def how(self) -> str:
        """Where it was measured, and at which sizes."""
        sizes = " and ".join(str(size) for size in dict.fromkeys(self.sizes))
        return (
            f"measured on {self.device_name} with microbatches of {sizes}; other sizes "
            "on the straight line through them"
        )

    def layers(self, num_samples: int) -> tuple[LayerCost, ...]:
        """Return costs on the straight line through the measurements."""
        pairs = zip(*self.profiles, strict=True)
        return tuple(self._layer(a, b, num_samples) for a, b in pairs)

    def _layer(self, a: LayerCost, b: LayerCost, num_samples: int) -> LayerCost:
        def seconds(name: str) -> float:
            pair = (float(getattr(a, name)), float(getattr(b, name)))
            line = Affine.through(self.sizes, pair)
            # Noise may tilt the line; a smaller microbatch never takes longer than a
            # larger one that was measured, nor less than its share.
            value = line.fixed + line.per_sample * num_samples
            shares = [
                x * num_samples / n for x, n in zip(pair, self.sizes, strict=True)
            ]
            return max(value, min(shares))

        def num_bytes(name: str) -> int:
            pair = (float(getattr(a, name)), float(getattr(b, name)))
            return Affine.through(self.sizes, pair).at(num_samples)

        numbers: dict[str, Any] = {name: seconds(name) for name in _SECONDS}
        numbers |= {name: num_bytes(name) for name in _BYTES}
        return LayerCost(
            a.name,
            weights=a.weights,
            split=HeldBytes(*map(num_bytes, _HELD)) if a.split and b.split else None,
            **numbers,
        )


_HELD: Final = tuple(field.name for field in fields(HeldBytes))
_SECONDS: Final = tuple(x.name for x in fields(LayerCost) if x.name.endswith("_s"))
_BYTES: Final = tuple(x.name for x in fields(LayerCost) if x.name.endswith("_bytes"))
