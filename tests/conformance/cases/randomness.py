"""Random numbers in forwards: of torch, Python and NumPy.

hocket draws its own for each (seed, step, net, module, microbatch), so that no number
is the plain loop's. Here the draws themselves are looked at: that there are new ones in
each microbatch, in training alone, with the rate of the moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.conformance.script import Script, batches, case, chain, refused


class Draws(nn.Module):
    """In training draws a number, and notes whether it is a new one."""

    def __init__(self, draw: Callable[[], float], seen: list[Any]) -> None:
        super().__init__()
        self.draw, self.seen, self.last = draw, seen, -1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            drawn = self.draw()
            self.seen.append(drawn != self.last)
            self.last = drawn
            x = x + 0.0 * drawn
        return x


def _drawing(draw: Callable[[], float]) -> Script:
    seen: dict[str, list[Any]] = {"new": []}
    net = chain(nn.Linear(6, 8), Draws(draw, seen["new"]), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), seen=seen)


@case(
    "Python's random numbers in forward: new ones in each microbatch",
    {"freeze": refused("1 is the layer 1, and 2 is the layer 1")},
)
def python_random() -> Script:
    """As layer drop draws them."""
    return _drawing(random.random)


@case(
    "NumPy's random numbers in forward: new ones in each microbatch",
    {"freeze": refused("1 is the layer 1, and 2 is the layer 1")},
)
def numpy_random() -> Script:
    """Of the global generator."""
    return _drawing(lambda: float(np.random.rand()))


@case(
    "a generator of the module's own: new numbers in each microbatch",
    {"freeze": refused("1 is the layer 1, and 2 is the layer 1")},
)
def own_generator() -> Script:
    """`random.Random(0)`, kept by a module."""
    return _drawing(random.Random(0).random)


@case("torch's random numbers in forward: new ones in each microbatch")
def torch_random() -> Script:
    """Read as a number, as stochastic depth does."""
    return _drawing(lambda: float(torch.rand(())))


class DropsLayers(nn.Module):
    """Leaves layers out by Python's random numbers, with a rate of the moment."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.training and random.random() < self.rate:
                continue
            x = x + torch.tanh(layer(x))
        return self.last(x)


@case(
    "layer drop of a rate that rises from 0 to 1",
    {
        "own-2 wpipe": refused("it draws random numbers of Python"),
        "freeze": refused("the model's own forward is cut apart"),
    },
)
def layer_drop() -> Script:
    """At 0 and 1 no number decides."""

    def before_step(step: int, net: Any) -> None:
        net.rate = float(step >= 2)

    return Script(
        DropsLayers(),
        batches(),
        before_step=before_step,
        cut="layers.1",
        layers="layers.*",
        frozen=("first", "layers.0"),
    )


class Masked(nn.Module):
    """Notes that its dropout masks differ, and uses them not."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.seen, self.last = seen, torch.zeros(64)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.dropout(torch.ones(64))
        if self.training:
            self.seen.append(bool((mask != self.last).any()))
            self.last = mask
        return x


@case("dropout masks: new ones in each microbatch, none in evaluation")
def dropout_masks() -> Script:
    """Whatever seeds them."""
    seen: dict[str, list[Any]] = {"new": []}
    net = chain(nn.Linear(6, 8), Masked(seen["new"]), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), seen=seen)
