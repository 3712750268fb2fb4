"""Two workers whose devices are of two kinds, as far as hocket can see."""

from __future__ import annotations

import platform
from collections.abc import Callable
from time import perf_counter

import pytest
import torch
from torch import nn

from hocket.model.profile import measure
from tests.run.support.joined import join
from tests.run.support.started import started

NUM_LAYERS = 12
SLOWER = 20.0  # far more than what a busy machine does to a profile


def slow_clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that a slower device would have."""
    return lambda: SLOWER * perf_counter()


def boundaries(profile_dir: str | None) -> list[int]:
    """Return the cut of equal layers, where rank 1's device is slower."""
    world = join()
    if world.rank == 1:
        patch = pytest.MonkeyPatch()
        patch.setattr(platform, "processor", lambda: "a slow processor")
        patch.setattr(measure, "clock_of", slow_clock_of)
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(NUM_LAYERS)]
    batch = torch.ones(64, 256), torch.ones(64, 256)
    with started(
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        torch.optim.SGD,
        batch,
        profile_dir=profile_dir,
        world=world,
    ) as pipeline:
        return list(pipeline.plan.boundaries)
