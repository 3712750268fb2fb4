"""Plain attributes that the loop changes between two steps."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.conformance.script import Script, batches, case, chain, refused

WHAT: Final = "attributes of modules"


class Warm(nn.Module):
    """Two layers; the root's forward divides by a temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.temperature = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) / self.temperature


@case(
    "a temperature in the root's forward",
    # Frozen layers become a stage of their own: the forward is cut apart.
    {"freeze": refused("the model's own forward")},
)
def temperature() -> Script:
    """As a schedule anneals it."""

    def before_step(step: int, net: Any) -> None:
        net.temperature = 1 + step / 2

    return Script(Warm(), batches(), before_step=before_step, cut="b")


@case(
    "the momentum of a BatchNorm",
)
def batchnorm_momentum() -> Script:
    """As nets for point clouds schedule it."""

    def before_step(step: int, net: Any) -> None:
        net[1].momentum = 0.1 / (step + 1)

    net = chain(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)
