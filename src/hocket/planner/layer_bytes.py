"""Adds up the memory of adjacent layers that form one stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class LayerBytes(Protocol):
    """One layer's memory for one microbatch, measured or counted."""

    @property
    def received_bytes(self) -> int:
        """What it receives from the layer before."""

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
        """The most that its operators allocate beside, in the forward."""

    @property
    def backward_work_bytes(self) -> int:
        """The same in its backward."""


class SplitBytes(LayerBytes, Protocol):
    """The memory of one layer with a split backward."""

    @property
    def weight_grad_held_bytes(self) -> int:
        """What the layer made that is held from I until W."""

    @property
    def held_input_bytes(self) -> int:
        """What it received that is held from I until W."""

    @property
    def input_grad_work_bytes(self) -> int:
        """The most that I allocates beside."""

    @property
    def weight_grad_work_bytes(self) -> int:
        """The same in W."""


def activation_bytes(layers: Sequence[LayerBytes]) -> int:
    """Return what layers keep, beside what the first one received."""
    made = sum(layer.activation_bytes for layer in layers)
    return made + sum(layer.kept_input_bytes for layer in layers[1:])


def forward_work_bytes(layers: Sequence[LayerBytes]) -> int:
    """Return the most that any layer's forward allocates, with its input."""
    first, *others = layers
    inside = [layer.received_bytes + layer.forward_work_bytes for layer in others]
    return max(first.forward_work_bytes, *inside, 0)


def backward_work_bytes(layers: Sequence[LayerBytes]) -> int:
    """Return the most that any layer's backward allocates.

    The layers behind it have released what they kept. All but the last layer's output
    gradient is the stage's own.
    """
    work = [layer.backward_work_bytes for layer in layers]
    return _most_beyond(layers, work, [-kept for kept in _kept_bytes(layers)])


def weight_grad_held_bytes(layers: Sequence[SplitBytes]) -> int:
    """Return what layers hold from I until W, beside what the first one received."""
    return sum(_held_bytes(layers))


def input_grad_work_bytes(layers: Sequence[SplitBytes]) -> int:
    """Return the most that any layer's I allocates; later layers hold W's inputs."""
    work = [layer.input_grad_work_bytes for layer in layers]
    pairs = zip(_held_bytes(layers), _kept_bytes(layers), strict=True)
    return _most_beyond(layers, work, [held - kept for held, kept in pairs])


def weight_grad_work_bytes(layers: Sequence[SplitBytes]) -> int:
    """Return the most that any layer's W allocates."""
    behind = accumulate(reversed(_held_bytes(layers)), initial=0)
    work = [layer.weight_grad_work_bytes for layer in reversed(layers)]
    return max(0, *(own - freed for own, freed in zip(work, behind, strict=False)))


def _most_beyond(
    layers: Sequence[LayerBytes], work: Sequence[int], left: Sequence[int]
) -> int:
    """Return the most at any layer on the way back, beyond the bytes at the begin.

    Args:
        layers: the layers of one stage.
        work: what each allocates for itself when it runs.
        left: what each leaves allocated: negative if it releases more.
    """
    behind = [*accumulate(reversed(left[1:]), initial=0)][::-1]
    grads = [*(layer.received_grad_bytes for layer in layers[1:]), 0]
    return max(0, *(sum(parts) for parts in zip(behind, grads, work, strict=True)))


def _kept_bytes(layers: Sequence[LayerBytes]) -> list[int]:
    """Return what each layer keeps, without what the first one received."""
    inputs = [0, *(layer.kept_input_bytes for layer in layers[1:])]
    made = [layer.activation_bytes for layer in layers]
    return [a + b for a, b in zip(made, inputs, strict=True)]


def _held_bytes(layers: Sequence[SplitBytes]) -> list[int]:
    inputs = [0, *(layer.held_input_bytes for layer in layers[1:])]
    made = [layer.weight_grad_held_bytes for layer in layers]
    return [a + b for a, b in zip(made, inputs, strict=True)]
