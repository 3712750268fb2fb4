"""Modules whose forward runs a backward of its own: forces, gradient penalties."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.conformance.script import (
    OWN,
    Script,
    batches,
    case,
    chain,
    refused,
    unsuited,
)

WHAT: Final = "backwards inside of a forward"


class Energy(nn.Module):
    """The energy of each sample, and what its parts give of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def slope(self, x: Tensor) -> Tensor:
        """Also in evaluation, and behind layers that are frozen."""
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Forces(Energy):
    """Times its gradient in the input, as nets for molecules compute forces."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy * forces


class Slope(Energy):
    """The input moved along the energy's gradient, with the graph of all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.slope(x)


class Transformed(Energy):
    """The same, as torch.func writes it."""

    def forward(self, x: Tensor) -> Tensor:
        slope: Any = torch.func.grad(lambda y: self.energy(y).sum())(x)
        return x + slope


class InGlue(Energy):
    """The whole model's own forward takes the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.slope(x))


@case("forces: the gradient of an energy in the input")
def forces() -> Script:
    """The module cuts the graph itself."""
    net = chain(nn.Linear(6, 6), Forces(), nn.Tanh(), nn.Linear(6, 8))
    return Script(net, batches())


@case("a gradient penalty: `create_graph=True`, and the graph goes on")
def slope() -> Script:
    """The second derivative reaches the weights, and the layers before."""
    net = chain(nn.Linear(6, 6), Slope(), nn.Tanh(), nn.Linear(6, 8))
    return Script(net, batches())


@case("`torch.func.grad` in a submodule")
def transformed() -> Script:
    """They take no hooks on what autograd saves."""
    net = chain(nn.Linear(6, 6), Transformed(), nn.Tanh(), nn.Linear(6, 8))
    return Script(net, batches())


@case(
    "`autograd.grad` in the root's forward",
    {
        OWN: refused("in a submodule"),
        "compile": unsuited("some runs are wrong, others right"),
    },
)
def in_glue() -> Script:
    """No graph of the model has the backward of that."""
    return Script(InGlue(), batches(), cut="last")
