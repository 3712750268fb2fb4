"""A plain loop and a captured one, over the same batches, with what happens between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.run.stage.seed import step_seed
from tests.run.outoforder.support.small_steps import difference
from tests.run.support.started import started

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Between = Callable[[int, Any, torch.optim.Optimizer], object]

SEED: Final = 3
NUM_STEPS: Final = 5


def batches() -> list[tuple[Tensor, Tensor]]:
    """Six numbers each, of three classes."""
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, generator=rng, dtype=torch.float64),
            torch.randint(3, (8,), generator=rng),
        )
        for _ in range(NUM_STEPS)
    ]


def net() -> nn.Sequential:
    """Two layers with BatchNorm and dropout; the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()),
        nn.Linear(8, 3),
    ).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Gradients show in the weights as they are; it has a state."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def nothing(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What most loops do between two steps."""


def plainly(
    model: nn.Module,
    make: MakeOptimizer,
    data: Sequence[Any],
    between: Between = nothing,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> nn.Module:
    """Train with torch alone, under the seeds of a pipeline's captured steps."""
    own = [*loss.parameters()] if isinstance(loss, nn.Module) else []
    optimizer = make([*model.parameters(), *own])
    _seed_others()
    for step, (inputs, targets) in enumerate(data):
        between(step, model, optimizer)
        torch.manual_seed(step_seed(SEED, step))
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def compiled(
    model: nn.Module,
    make: MakeOptimizer,
    data: Sequence[Any],
    between: Between = nothing,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> list[bool]:
    """Train by `compile_step`; return which steps were captured ones."""
    captured = []
    with (
        hocket.compile_step(model, loss, make, example=data[0], num_lanes=1) as step,
        _noted(step) as played,
    ):
        _seed_others()
        for number, batch in enumerate(data):
            between(number, model, step.optimizer)
            torch.manual_seed(step_seed(SEED, number))
            played.clear()
            step(batch)
            captured.append(bool(played))
    return captured


@contextmanager
def _noted(step: hocket.CompiledStep) -> Iterator[list[int]]:
    """Note each captured step that is played."""
    played: list[int] = []
    orders = step._orders
    find = orders.for_batch

    def for_batch(batch: Any) -> Any:
        order = find(batch)
        if order is not None:
            played.append(1)
        return order

    orders.for_batch = for_batch  # type: ignore[method-assign]
    yield played


def piped(
    model: nn.Module,
    make: MakeOptimizer,
    data: Sequence[Any],
    between: Between = nothing,
) -> None:
    """Train by a pipeline of captured steps."""
    with started(
        model,
        F.cross_entropy,
        make,
        data[0],
        num_microbatches=1,
        schedule="ooo-single",
        seed=SEED,
    ) as pipeline:
        _seed_others()
        for number, batch in enumerate(data):
            between(number, model, None)  # type: ignore[arg-type]
            pipeline.step(batch)
        state = pipeline.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def _seed_others() -> None:
    random.seed(0)
    np.random.seed(0)


def equal(model: nn.Module, plain: nn.Module) -> bool:
    """Whether all weights and buffers are the plain loop's to 1e-10."""
    return difference(model, plain) <= 1e-10
