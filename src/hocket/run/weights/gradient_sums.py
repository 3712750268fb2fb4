"""Adds up the gradients of several updates, for policies that look at them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class GradientSums:
    """The sum of each parameter's gradients since the norms were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the gradients with which parameters are about to be updated."""
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            if name in self._sums:
                self._sums[name] += parameter.grad
            else:
                self._sums[name] = parameter.grad.detach().clone()

    def take_norms(self) -> dict[str, float]:
        """Return the 1-norm of each sum, and begin again."""
        norms = {name: x.double().abs().sum().item() for name, x in self._sums.items()}
        self._sums.clear()
        return norms
