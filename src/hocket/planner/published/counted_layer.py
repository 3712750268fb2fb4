"""A layer that is counted by hand, without a framework.

It is its matrix products, and the bytes that everything else reads and writes:

    attention   x ─▶ q k v ─▶ scores ─▶ context ─▶ out        per sample and token
    mlp         x ─▶ wide ─▶ narrow                           of a transformer's block

Attention and MLP are layers of their own, so that a cut may go between them. All
numbers are float32, as the experiments were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from hocket.planner.counted import LayerOps, Ops
from hocket.planner.work import Affine, Weights

_FLOAT: Final = 4  # bytes
_STATES: Final = 2  # of Adam, per weight
_NOTHING: Final = Affine(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of one sample: `rows` x `inner` times `inner` x `columns`.

    Args:
        rows: the rows, which grow with the samples.
        inner: the inner dimension of both factors.
        columns: the columns of the second factor.
        has_weights: the second factor is weights, and not another activation.
        num_times: done one after another, each waiting for the one before.
    """

    rows: int
    inner: int
    columns: int
    has_weights: bool = True
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class CountedLayer:
    """The operators and weights of one layer.

    Args:
        name: the layer's name.
        products: the matrix products, in order.
        other_floats: numbers that all else reads and writes in a forward, per sample.
        kept_floats: from the forward for the backward, per sample.
        received_floats: numbers of its input, per sample.
        num_weights: beside those of the products.
        num_states: the optimizer's state per weight.
    """

    name: str
    products: tuple[Product, ...]
    other_floats: int
    kept_floats: int
    received_floats: int
    num_weights: int = 0
    num_states: int = _STATES

    @property
    def weights(self) -> int:
        """The number of trained weights."""
        own = (p.inner * p.columns for p in self.products if p.has_weights)
        return self.num_weights + sum(own)

    def ops(self) -> LayerOps:
        """Return the operators for `CountedCosts`."""
        forward = [*self._forward()]
        back = [*self._input_grad()]
        num_bytes = _FLOAT * self.weights
        received = Affine(0.0, _FLOAT * self.received_floats)
        states = self.num_states * num_bytes
        weights = Weights(self.name, num_bytes, num_bytes, states)
        return LayerOps(
            self.name,
            _ops(forward),
            _ops(back),
            _ops([*back, *self._weight_grad()]),
            activation_bytes=Affine(0.0, _FLOAT * self.kept_floats),
            kept_input_bytes=_NOTHING,
            received_bytes=received,
            received_grad_bytes=received,
            weights=(weights,),
        )

    def _forward(self) -> Iterator[_Op]:
        for product in self.products:
            for _ in range(product.num_times):
                yield _product(product)
        yield _Op(0.0, 0.0, _FLOAT * self.other_floats)

    def _input_grad(self) -> Iterator[_Op]:
        for product in self.products:
            for _ in range(product.num_times):
                yield _product(product)
                if not product.has_weights:  # the gradient of the other factor, too
                    yield _product(product)
        yield _Op(0.0, 0.0, 2 * _FLOAT * self.other_floats)

    def _weight_grad(self) -> Iterator[_Op]:
        """Return the operators of all times at once: nothing waits."""
        for product in self.products:
            if product.has_weights:
                op = _product(product)
                times = product.num_times
                yield _Op(times * op.flops, op.fixed_bytes, times * op.sample_bytes)


@dataclass(frozen=True, slots=True)
class _Op:
    """One operator: FLOPs and bytes per sample, and bytes whatever the samples."""

    flops: float
    fixed_bytes: float
    sample_bytes: float


def _product(product: Product) -> _Op:
    rows, inner, columns = product.rows, product.inner, product.columns
    second = _FLOAT * inner * columns
    moved = _FLOAT * rows * (inner + columns)
    if product.has_weights:
        return _Op(2.0 * rows * inner * columns, second, moved)
    return _Op(2.0 * rows * inner * columns, 0.0, moved + second)


def _ops(ops: list[_Op]) -> Ops:
    nothing = [0.0] * len(ops)
    fixed, per_sample = [op.fixed_bytes for op in ops], [op.sample_bytes for op in ops]
    return Ops(
        np.array([nothing, [op.flops for op in ops]]),
        np.array([fixed, per_sample]),
        np.array([nothing, per_sample]),
    )
