"""One worker trains a perceptron: with batches on the device and on the host."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.gpu.checked import Row, Setting, by_name
from hocket.run.cluster.world import single_process_world

NUM_STEPS: Final = 3
BATCH_SIZE: Final = 16
WIDTH: Final = 32

Batch = tuple[Tensor, Tensor]


def perceptron(width: int = WIDTH, dropout: float = 0.0) -> nn.Sequential:
    """Four layers, always with the same weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, width))


def batch_on(device: torch.device, width: int = WIDTH) -> Batch:
    """A batch, always the same."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH_SIZE, width, generator=generator) for _ in range(2))
    return x.to(device), y.to(device)


def pipeline_on(
    device: torch.device,
    model: nn.Module,
    example: Batch,
    schedule: str = "1f1b",
    **options: Any,
) -> hocket.Pipeline:
    """A pipeline of one worker, which is this process.

    Args:
        device: where it computes.
        model: on that device already.
        example: a batch.
        schedule: its name.
        options: of `hocket.Pipeline`, besides these.
    """
    return hocket.Pipeline(
        model,
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
        example=example,
        schedule=schedule,
        num_microbatches=4,
        world=single_process_world(device),
        **options,
    )


def batches_on_the_device(setting: Setting) -> Row:
    """Three steps; the loss goes down."""
    return _train(setting, batch_on(setting.device))


def batches_on_the_host(setting: Setting) -> Row:
    """The same: the pipeline moves what it needs to the device."""
    return _train(setting, batch_on(torch.device("cpu")))


def _train(setting: Setting, batch: Batch) -> Row:
    model = perceptron().to(setting.device)
    with pipeline_on(setting.device, model, batch) as pipeline:
        results = [pipeline.step(batch) for _ in range(NUM_STEPS)]
    losses = [result.loss for result in results]
    return {
        "losses": losses,
        "step_ms": [round(result.seconds * 1e3, 3) for result in results],
        "holds": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
    }


CHECKS: Final = by_name(batches_on_the_device, batches_on_the_host)
