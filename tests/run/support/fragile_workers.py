"""Workers that train until a gradient is no number, though the loss is one."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import HocketError, WaitError
from hocket.model.trace.local import local
from hocket.run.cluster.world import World
from hocket.run.engine.sync.step_result import StepResult
from tests.run.support.joined import join
from tests.run.support.plainly import SGD, classified
from tests.run.support.started import started

POISONED: Final = 3  # the step of `flush_free` whose gradient is no number
FRAGILE_CUT: Final = ["2", "4", "6"]


class Length(nn.Module):
    """Adds its input's length; the gradient of a length of 0 is not a number."""

    def forward(self, x_BW: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return x_BW + x_BW.square().sum(1, keepdim=True).sqrt()


def make_fragile() -> nn.Sequential:
    """A model whose loss stays finite where the first layer's gradient does not."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6, bias=False), Length(), nn.Linear(6, 6)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3)).double()


def fragile_batches(num_batches: int, poisoned: int) -> list[tuple[Tensor, Tensor]]:
    """Vectors, of which one in the poisoned batch has length 0."""
    batches = classified([8] * num_batches, 6, 3, seed=5)
    batches[poisoned][0][5] = 0.0
    return batches


def fragile_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train fragile models until a gradient is not finite."""
    world = join()
    return [_fragile(world, case, folder) for case in cases]


def _fragile(world: World, case: dict[str, Any], folder: str) -> dict[str, Any]:
    model = make_fragile()
    batches = fragile_batches(6, poisoned=4)
    pipeline = hocket.Pipeline(
        model,
        F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        example=batches[0],
        profile_dir=Path(folder) / "profiles",
        world=world,
        **case,
    )
    reported, num_done = ["", ""], 0
    before: list[Tensor] = []
    kept = [
        local(pipeline._executor.stored(p).detach())
        for runner in pipeline._executor.runners.values()
        for p in runner.parameters.values()
    ]
    try:
        for result in pipeline.train(batches):
            before = [x.clone() for x in kept]
            num_done = result.step + 1
    except HocketError as error:
        reported = [type(error).__name__, str(error)]
    same = all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    return {"raised": reported, "num_done": num_done, "same": same}


def left_unread(folder: str) -> list[str]:
    """Ask for a norm, twice, when the block around the pipeline has failed."""
    batches = [(x + 0.1, y) for x, y in fragile_batches(4, poisoned=0)]
    result: StepResult | None = None
    with (
        suppress(KeyError),
        started(
            make_fragile(),
            F.cross_entropy,
            SGD,
            batches[0],
            schedule="pipedream-2bw",
            num_microbatches=4,
            profile_dir=Path(folder) / "profiles",
            world=join(),
        ) as pipeline,
    ):
        result = pipeline.step(batches[0])
        pipeline.world.barrier("no worker closes what others still need")
        raise KeyError
    assert result is not None
    reported = []
    for _ in range(2):
        with pytest.raises(WaitError) as error:
            _ = result.grad_norm
        reported.append(str(error.value))
    return reported


def make_fragile_stages() -> torch.nn.Sequential:
    """Four stages, of which the second has nothing to train."""
    layers = make_fragile()
    layers[2].requires_grad_(requires_grad=False)
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(3, 3).double())


def flush_free() -> list[Any]:
    """Train until a gradient of the first stage is no number, but the loss is one.

    Returns:
        The losses that this worker got, and the first stage's weights.
    """
    model = make_fragile_stages()
    data = fragile_batches(8, poisoned=POISONED)
    try:
        with started(
            model,
            torch.nn.functional.cross_entropy,
            partial(torch.optim.SGD, lr=0.1),
            data[0],
            schedule="wpipe",
            cut=FRAGILE_CUT,
        ) as pipeline:
            list(pipeline.train(data))
    except HocketError as error:
        return [
            type(error).__name__,
            str(error),
            model.get_parameter("0.weight").tolist(),
        ]
    return []
