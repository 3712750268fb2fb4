"""Adds up the gradients of several updates, for policies that look at them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class GradientSums:
    """The sum of each parameter's gradients.

    Args:
        sums: what was added up before, by name.
    """

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self.sums = dict(sums)

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the gradients with which parameters are about to be updated."""
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            if name in self.sums:
                self.sums[name] += parameter.grad
            else:
                self.sums[name] = parameter.grad.detach().clone()

    def norms(self) -> dict[str, float]:
        """Return the 1-norm of each sum."""
        return {name: x.double().abs().sum().item() for name, x in self.sums.items()}
