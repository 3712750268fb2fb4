"""Batches, and the loop over them as torch's docs write it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
SGD: Final = partial(torch.optim.SGD, lr=0.1)


def classified(
    sizes: Sequence[int], width: int, num_classes: int, *, seed: int
) -> list[Batch]:
    """Draw batches of these sizes: vectors in float64, and classes."""
    rng = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, width, generator=rng, dtype=torch.float64),
            torch.randint(num_classes, (size,), generator=rng),
        )
        for size in sizes
    ]


def train_plainly(
    model: nn.Module,
    loss: Any,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    num_parts: int = 1,
    clip_norm: float = math.inf,
) -> list[float]:
    """Train a model; return each step's loss.

    Args:
        model: trained in place.
        loss: of an output and targets; what it trains is its own "loss" in a dict.
        optimizer: makes it, of the model's parameters.
        batches: pairs of inputs and targets.
        num_parts: microbatches of each batch, weighted by their samples.
        clip_norm: the largest norm of a step's gradients.
    """
    own = optimizer(model.parameters())
    losses = []
    for inputs, targets in batches:
        parts = inputs.tensor_split(num_parts), targets.tensor_split(num_parts)
        own.zero_grad()
        total = 0.0
        for x, y in zip(*parts, strict=True):
            value = loss(model(x), y)
            value = value["loss"] if isinstance(value, dict) else value
            share = value * (len(x) / len(inputs))
            share.backward()
            total += share.item()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        own.step()
        losses.append(total)
    return losses
