"""Small trainings with optimizers and gradients of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.run.weights.settings import Parameters
from tests.run.support.optimizers import OPTIMIZERS

NUM_STEPS = 9
CUT = "2"  # where the second stage begins
Batches = Sequence[tuple[Tensor, Tensor]]


class Sometimes(nn.Module):
    """A layer with a part that only some batches come by: else it gets no gradient."""

    def __init__(self) -> None:
        """Of two parts."""
        super().__init__()
        self.always = nn.Linear(3, 4)
        self.other = nn.Linear(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """By the sign of the first number."""
        out: Tensor = self.always(inputs)
        return out + self.other(inputs) if inputs[0, 0] > 0 else out


def dense() -> nn.Sequential:
    """Of two stages."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def sometimes() -> nn.Sequential:
    """Whose first stage has weights that get no gradient in some steps."""
    torch.manual_seed(0)
    return nn.Sequential(Sometimes(), nn.Tanh(), nn.Linear(4, 2)).double()


def sparse() -> nn.Sequential:
    """Whose first stage gets gradients of few rows."""
    torch.manual_seed(0)
    words = nn.Embedding(9, 4, sparse=True)
    return nn.Sequential(words, nn.Tanh(), nn.Linear(4, 2)).double()


def numbers() -> Batches:
    """For the first two; the sign that `Sometimes` asks for changes."""
    torch.manual_seed(1)
    batches = [torch.randn(6, 3).double() for _ in range(NUM_STEPS)]
    for t, inputs in enumerate(batches):
        inputs[0, 0] = inputs[0, 0].abs() * (1 if t % 3 == 1 else -1)
    return [(inputs, torch.randn(6, 2).double()) for inputs in batches]


def words() -> Batches:
    """For the third."""
    torch.manual_seed(1)
    shapes = [(torch.randint(9, (4,)), torch.randn(4, 2)) for _ in range(NUM_STEPS)]
    return [(inputs, targets.double()) for inputs, targets in shapes]


def sparsely(parameters: Parameters) -> torch.optim.Optimizer:
    """Adam for rows where gradients have rows."""
    if len(parameters) == 1:  # the embedding's stage
        return torch.optim.SparseAdam(list(parameters), lr=3e-2)
    return torch.optim.AdamW(parameters, lr=3e-2)


CASES: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Batches], Any]] = {
    "nesterov": (dense, numbers, OPTIMIZERS["nesterov"]),
    "adamw": (dense, numbers, OPTIMIZERS["adamw"]),
    "groups": (dense, numbers, OPTIMIZERS["groups"]),
    "muon": (dense, numbers, OPTIMIZERS["muon"]),
    "lars": (dense, numbers, OPTIMIZERS["lars"]),
    "adafactor": (dense, numbers, OPTIMIZERS["adafactor"]),
    "nesterov, sometimes": (sometimes, numbers, OPTIMIZERS["nesterov"]),
    "adamw, sometimes": (sometimes, numbers, OPTIMIZERS["adamw"]),
    "muon, sometimes": (sometimes, numbers, OPTIMIZERS["muon"]),
    "sgd, sparse": (sparse, words, lambda p: torch.optim.SGD(p, lr=0.3)),
    "adam, sparse": (sparse, words, sparsely),
}
