"""Small models for runs in two waves, and how far two states differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class ShortNet(nn.Module):
    """Weights of float64, and products of float32, which autocast shortens.

    So its numbers differ where autocast is forgotten, and all else is exact to 1e-10.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 3 classes, in float64."""
        for layer in (self.first, self.last):
            x = F.linear(x.float(), layer.weight.float(), layer.bias.float()).double()
            x = torch.tanh(x) if layer is self.first else x
        return x


def make_short_net() -> ShortNet:
    """Return a model of float64 weights."""
    torch.manual_seed(0)
    return ShortNet().double()


class SmallNet(nn.Module):
    """Batch norm, dropout, a recomputed part with dropout, a weight without use."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before batch norm has gradients of rounding errors, which AdamW scales.
        linear = nn.Linear(WIDTH, 8, bias=False)
        self.first = nn.Sequential(linear, nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.last_bias = self.last.bias  # tied

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 3 classes."""
        x = F.dropout(self.first(x), 0.2, self.training)
        return self.last(checkpoint(self.second, x, use_reentrant=False))


def make_net(seed: int = 0) -> SmallNet:
    """Return a model of float64."""
    torch.manual_seed(seed)
    return SmallNet().double()


def make_batches(num: int, size: int = 12, last: int | None = None) -> list[Any]:
    """Return random batches; the last one may be smaller."""
    generator = torch.Generator().manual_seed(1)
    sizes = [size] * (num - 1) + [size if last is None else last]
    return [
        (
            torch.randn(n, WIDTH, dtype=torch.float64, generator=generator),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def losses(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return what is trained, and a number beside it."""
    return {"loss": F.cross_entropy(output, targets), "size": output.square().mean()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer under test."""
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that changes at every step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest relative difference of two states."""
    assert list(a) == list(b)
    return max(
        float(
            (a[k].double() - b[k].double()).norm() / b[k].double().norm().clamp(1e-30)
        )
        for k in a
    )
