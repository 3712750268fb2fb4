"""Costs of layers on a device that need not be present: a roofline, op by op.

seconds │         ______ limit of FLOPs
│      __/
│ ____/          limit of bytes, or of starting an operator at all
└──────────────▶ samples in the microbatch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hocket.core.hardware import Hardware
from hocket.core.timelines.arrays import Floats
from hocket.planner.work import Affine, LayerCost, Weights


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
            f"counted: FLOPs and bytes of each operator on {self.hardware.name}, at "
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
