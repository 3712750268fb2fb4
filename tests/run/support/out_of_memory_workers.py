"""What the workers of the memory tests do: train, until one has no memory left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket import env
from tests.run.support.forked import FAULT
from tests.run.support.started import started

WIDTH: Final = 4
INNER: Final = 8192
SMALL: Final = 8  # samples of a batch that fits
LARGE: Final = (
    8192  # ... and of one that does not: 2048 * INNER * 4 bytes per microbatch
)
SPARE_BYTES: Final = 32 << 20

Batch = tuple[Tensor, Tensor]


def make_batch(num_samples: int) -> Batch:
    """Random vectors."""
    rng = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, WIDTH, generator=rng)
    return x, torch.randn(num_samples, WIDTH, generator=rng)


def make_model() -> nn.Module:
    """A small layer, and two around many hidden values, which make the second stage."""
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inside)


def train(folder: str, evaluates: bool) -> list[float]:
    """Two small steps, then a large batch, for which the last worker has no memory."""
    torch.set_num_threads(1)
    with started(
        make_model(),
        F.mse_loss,
        (lambda parameters: torch.optim.SGD(parameters, lr=1e-3)),
        make_batch(SMALL),
        num_microbatches=4,
        cut=["1.0"],
        run_dir=folder,
    ) as pipeline:
        small = [make_batch(SMALL) for _ in range(2)]
        losses = [result.loss for result in pipeline.train(small)]
        if evaluates:
            pipeline.evaluate(_large(folder))
        losses += [result.loss for result in pipeline.train(_large(folder))]
    return losses


def _large(folder: str) -> Iterator[Batch]:
    if env.RANK.integer() == 1:
        _starve()
        written = Path(folder) / f"{FAULT}.part"
        written.write_text("1")
        written.rename(Path(folder) / FAULT)
    yield make_batch(LARGE)


def _starve() -> None:
    """From now on, this process can take only a little more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
