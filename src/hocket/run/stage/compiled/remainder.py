"""W of a compiled stage, with what I holds for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hocket.run.stage.compiled.products import Backward
from hocket.run.stage.memory import memory_of, num_bytes_held
from hocket.run.stage.split.layers.accumulate import accumulate, has_hooks


class CompiledRemainder:
    """W's graph and inputs, until it runs.

    Args:
        backward: W.
        inputs: the tensors that I and the forward hold for it.
        weights: the parameters whose gradients it makes, by number.
    """

    def __init__(
        self, backward: Backward, inputs: list[Tensor], weights: Mapping[int, Tensor]
    ) -> None:
        self._backward = backward
        self._inputs = inputs
        self._weights = weights

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the weight gradients and release what was held for them."""
        found = self._backward.run(self._inputs, self._weights)
        add_up([self._weights[i] for i in self._backward.returned], found)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it holds the memory of any of these tensors."""
        own = set(map(memory_of, self._held()))
        return any(memory_of(x) in own for x in tensors)

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds, each block of memory once."""
        return num_bytes_held(self._held())

    def _held(self) -> list[Tensor]:
        """Return the held tensors, without the weights."""
        weights = {id(x) for x in self._weights.values()}
        return [x for x in self._inputs if id(x) not in weights]


def add_up(parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients into those of parameters, as autograd would.

    Args:
        parameters: leaves.
        grads: one gradient of each; the caller may not use them afterwards.
    """
    sums: list[Tensor] = []
    parts: list[Tensor] = []
    for parameter, grad in zip(parameters, grads, strict=True):
        so_far = parameter.grad
        if so_far is None or so_far.is_sparse or has_hooks(parameter):
            accumulate(parameter, grad)
        else:
            sums.append(so_far)
            parts.append(grad)
    if sums:
        torch._foreach_add_(sums, parts)
