"""Training of one weight on a parabola with a delay: small enough to do by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Course:
    """What happened to the weight.

    Args:
        weights: before each update, and after the last.
        reads: what forwards of each of these read, but the last.
    """

    weights: Sequence[float]
    reads: Sequence[float]


def descent(lr: float, momentum: float = 0.0) -> MakeOptimizer:
    """SGD."""
    return lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum)


def train(
    settings: TrainingConfig,
    delay: int,
    num_updates: int,
    slope: Callable[[float], float] = lambda w: w,
) -> Course:
    """Begin at 1, and update by the gradient at what was read `delay` updates ago."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    updater = Updater({"w": weight}, settings, delay=delay)
    weights, reads = [1.0], []
    for t in range(num_updates):
        predicted = updater.predicted()
        reads.append((weight if predicted is None else predicted["w"]).item())
        weight.grad = torch.full_like(weight, slope(reads[max(0, t - delay)]))
        updater.update()
        weights.append(weight.item())
    return Course(weights, reads)
