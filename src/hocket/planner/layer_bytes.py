"""What layers that follow each other keep and use while they run, as one stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class LayerBytes(Protocol):
    """One layer for one microbatch, in bytes: measured, or counted without a device."""

    @property
    def received_bytes(self) -> int:
        """What comes from the layer before."""

    @property
    def received_grad_bytes(self) -> int:
        """The gradient of that."""

    @property
    def kept_input_bytes(self) -> int:
        """The part of what it received that its backward needs."""

    @property
    def activation_bytes(self) -> int:
        """What else its backward needs."""

    @property
    def forward_work_bytes(self) -> int:
        """The most that its operators use beside all this while it runs forward."""

    @property
    def backward_work_bytes(self) -> int:
        """The same in its backward."""


def activation_bytes(layers: Sequence[LayerBytes]) -> int:
    """What layers that follow each other keep, beside what the first one received."""
    made = sum(layer.activation_bytes for layer in layers)
    return made + sum(layer.kept_input_bytes for layer in layers[1:])


def forward_work_bytes(layers: Sequence[LayerBytes]) -> int:
    """The most in any layer; all but the first layer's input is the stage's own."""
    first, *others = layers
    inside = [layer.received_bytes + layer.forward_work_bytes for layer in others]
    return max(first.forward_work_bytes, *inside, 0)


def backward_work_bytes(layers: Sequence[LayerBytes]) -> int:
    """The most at any layer, when those behind it have given back what they kept.

    All but the last layer's output gradient is the stage's own.
    """
    made = accumulate(layer.activation_bytes for layer in layers)
    inputs = accumulate([0, *(layer.kept_input_bytes for layer in layers[1:])])
    kept = [a + b for a, b in zip(made, inputs, strict=True)]
    grads = [*(layer.received_grad_bytes for layer in layers[1:]), 0]
    held = [
        kept[i] + grads[i] + layer.backward_work_bytes for i, layer in enumerate(layers)
    ]
    return max(0, max(held) - kept[-1])
