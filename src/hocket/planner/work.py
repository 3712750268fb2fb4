"""A model's costs at any number of samples: counted or measured.

The planner calls `layers(num_samples)` of either kind of costs:

    FLOPs, bytes  x  Hardware   ─▶ CountedCosts  ┐
    profiles at one or two sizes ─▶ MeasuredCosts ┴─▶ layers(num_samples)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import numpy as np

from hocket.core.hardware import Hardware
from hocket.core.timelines.arrays import Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """One parameter or buffer, wherever it is used.

    Args:
        name: its first name in the uncut model; the same in all layers that share it.
        num_bytes: bytes of its values.
        gradient_bytes: bytes of its gradient; 0 if it is not trained.
        optimizer_bytes: bytes of the optimizer's state.
        whole_bytes: bytes of its values once shards have gathered them, where these are
            of another type than what they keep; else 0.
    """

    name: str
    num_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    whole_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """A layer's memory with a split backward.

    Args:
        weight_grad_held_bytes: what it made that is held from I until W.
        held_input_bytes: what it received that is held from I until W.
        input_grad_work_bytes: the most that I allocates at once.
        weight_grad_work_bytes: the most that W allocates at once.
    """

    weight_grad_held_bytes: int = 0
    held_input_bytes: int = 0
    input_grad_work_bytes: int = 0
    weight_grad_work_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer's costs per microbatch; `StageCost` is a sum of these.

    Args:
        name: the layer's name.
        forward_s: seconds of F.
        input_grad_s: seconds of I, as a part of the whole backward.
        weight_grad_s: seconds of W, as a part of the whole backward.
        activation_bytes: what the forward makes and keeps for the backward.
        kept_input_bytes: what it keeps of its input, if no earlier layer does. A stage
            that begins with this layer holds it as a message that it received.
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
    def held(self) -> HeldBytes:
        """Its memory with a split backward; all that the forward kept, if unknown."""
        return self.split or HeldBytes(
            self.activation_bytes, self.kept_input_bytes, self.backward_work_bytes
        )

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
            "lie on the straight line through them"
        )

    def layers(self, num_samples: int) -> tuple[LayerCost, ...]:
        """Return costs on the straight line through the measurements."""
        pairs = zip(*self.profiles, strict=True)
        return tuple(self._layer(a, b, num_samples) for a, b in pairs)

    def _layer(self, a: LayerCost, b: LayerCost, num_samples: int) -> LayerCost:
        def pair(name: str) -> tuple[float, float]:
            first, second = (x.held if name in _HELD else x for x in (a, b))
            return float(getattr(first, name)), float(getattr(second, name))

        def seconds(name: str) -> float:
            values = pair(name)
            line = Affine.through(self.sizes, values)
            # Noise may tilt the line; a smaller microbatch never takes longer than a
            # larger one that was measured, nor less than its share.
            value = line.fixed + line.per_sample * num_samples
            shares = [
                x * num_samples / n for x, n in zip(values, self.sizes, strict=True)
            ]
            return max(value, min(shares))

        def num_bytes(name: str) -> int:
            return Affine.through(self.sizes, pair(name)).at(num_samples)

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


# Costs of layers on a device that need not be present: a roofline, op by op.
#
# seconds │         ______ limit of FLOPs
# │      __/
# │ ____/          limit of bytes, or of starting an operator at all
# └──────────────▶ samples in the microbatch
@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """The operators of one pass through a layer; their counts are linear in samples.

    Args:
        flops: FLOPs of matrix multiplications; row 0 fixed, row 1 per sample.
        num_bytes: bytes read and written; rows as for `flops`.
        live_bytes: the part of them that the pass itself has made; rows as for `flops`.
    """

    flops: Floats
    num_bytes: Floats
    live_bytes: Floats

    def seconds(self, num_samples: int, hardware: Hardware, precision: str) -> float:
        """The roofline, operator by operator: the slowest of three limits each."""
        limits_s = (
            _at(self.flops, num_samples) / hardware.reached_flops(precision),
            _at(self.num_bytes, num_samples) / hardware.reached_bytes_per_s,
        )
        slowest_s = np.maximum(np.maximum(*limits_s), hardware.op_s)
        return float(slowest_s.sum())

    def total_flops(self, num_samples: int) -> float:
        """Return the FLOPs of all operators."""
        return float(_at(self.flops, num_samples).sum())

    def work_bytes(self, num_samples: int) -> int:
        """Return the most bytes that any operator holds."""
        return round(float(_at(self.live_bytes, num_samples).max(initial=0.0)))


def _at(rows: Floats, num_samples: int) -> Floats:
    values: Floats = np.maximum(rows[0] + rows[1] * num_samples, 0.0)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class LayerOps:
    """What one layer computes, and its bytes.

    Args:
        name: the layer's name.
        forward: the forward's operators.
        input_grad: the operators of a backward for the input's gradient alone.
        backward: the operators of the whole backward.
        activation_bytes: see `LayerCost`.
        kept_input_bytes: see `LayerCost`.
        received_bytes: see `LayerCost`.
        received_grad_bytes: see `LayerCost`.
        weights: see `LayerCost`.
    """

    name: str
    forward: Ops
    input_grad: Ops
    backward: Ops
    activation_bytes: Affine
    kept_input_bytes: Affine
    received_bytes: Affine
    received_grad_bytes: Affine
    weights: tuple[Weights, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CountedCosts:
    """Costs from FLOPs and bytes, for a device that need not be present.

    Args:
        name: the model's name.
        ops: the operators of each layer.
        hardware: the device.
        precision: the type of its matrix multiplications.
        only_samples: see `ModelCosts`.
    """

    name: str
    ops: tuple[LayerOps, ...]
    hardware: Hardware
    precision: str
    only_samples: int | None = None

    @property
    def how(self) -> str:
        """How the seconds were found."""
        reached = self.hardware.matmul_fraction[self.precision]
        return (
            f"of the FLOPs and bytes of each operator on {self.hardware.name}, at "
            f"{100 * reached:.0f} % of its peak in "
            f"{self.precision} and {100 * self.hardware.bandwidth_fraction:.0f} % of "
            "its memory's"
        )

    @property
    def update_s_per_byte(self) -> float:
        """Seconds per byte: weights and state are read and written."""
        return _UPDATE_PASSES / self.hardware.reached_bytes_per_s

    def layers(self, num_samples: int) -> tuple[LayerCost, ...]:
        """Return the layers' costs by the roofline."""
        return tuple(self._layer(layer, num_samples) for layer in self.ops)

    def _layer(self, layer: LayerOps, num_samples: int) -> LayerCost:
        def seconds(ops: Ops) -> float:
            return ops.seconds(num_samples, self.hardware, self.precision)

        whole_s = seconds(layer.backward)
        input_s = min(whole_s, seconds(layer.input_grad))
        return LayerCost(
            layer.name,
            seconds(layer.forward),
            input_s,
            whole_s - input_s,
            layer.activation_bytes.at(num_samples),
            layer.kept_input_bytes.at(num_samples),
            layer.received_bytes.at(num_samples),
            layer.received_grad_bytes.at(num_samples),
            layer.forward.work_bytes(num_samples),
            layer.backward.work_bytes(num_samples),
            layer.weights,
        )


_UPDATE_PASSES: Final = 1.75  # weights and two states are written again
