"""On an accelerator: the pipeline equals the plain loop, and ops are timed rightly.

With one worker, `CHECKS` has each model in each order by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import hocket
from bench.gpu.checked import Checks, Row, Setting
from bench.models import Block, Head, Residual, Stem
from hocket.core.op import ASYNCHRONOUS
from hocket.run.cluster.world import World, single_process_world
from hocket.run.data.batch import split_batch

NUM_STEPS = 20
NUM_QUICK_STEPS = 2
NUM_MICROBATCHES = 4
BATCH_SIZE = 14  # microbatches of 4, 4, 3 and 3
NUM_TIMED = 5  # steps whose ops' times are looked at
MIN_BUSY = 0.7  # of a step on one device; timed by the host, ops would be far shorter
ORDERS = (("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 3), ("looped-bfs", 3))

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Specimen:
    """A model to train, and how to draw a batch for it.

    Args:
        make: the model.
        draw: a batch of some samples from a generator.
    """

    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]


def _perceptron() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 16, bias=False)]
    for _ in range(4):
        # No bias: before a batch norm its gradient is rounding noise, and AdamW would
        # make steps of it that depend on the order of additions.
        layers += [nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def _transformer() -> nn.Module:
    return nn.Sequential(*(Block(32) for _ in range(4)), _Classify(32))


def _resnet() -> nn.Module:
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1)]
    return nn.Sequential(Stem(8), *blocks, Head(16, 3))


class _Classify(nn.Module):
    """The mean over tokens, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From features to logits."""
        logits: Tensor = self.linear(x.mean(1))
        return logits


def _drawn(*shape: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(count: int, generator: torch.Generator) -> Batch:
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        return x, torch.randint(3, (count,), generator=generator)

    return draw


SPECIMENS = {
    "perceptron": Specimen(_perceptron, _drawn(6)),
    "transformer": Specimen(_transformer, _drawn(10, 32)),
    "resnet": Specimen(_resnet, _drawn(3, 8, 8)),
}


def check_all(world: World) -> list[Row]:
    """Train each specimen in each order, and compare its weights with the plain loop's.

    Returns:
        For each, the largest relative difference of a tensor, and whether it is within
        1e-10 (float64, 20 AdamW steps).
    """
    return [
        check_exact(world, name, schedule, stages_per_device, NUM_STEPS)
        for name in SPECIMENS
        for schedule, stages_per_device in ORDERS
    ]


def check_exact(
    world: World,
    name: str,
    schedule: str,
    stages_per_device: int | None,
    num_steps: int,
) -> Row:
    """One row of `check_all`."""
    specimen = SPECIMENS[name]
    expected = _plain(name, world.device, num_steps)
    batches = _batches(specimen, world.device, num_steps)
    state = _piped(specimen, batches, world, schedule, stages_per_device)
    difference = max(_difference(state[key], expected[key]) for key in expected)
    return {
        "model": name,
        "schedule": schedule,
        "stages": (stages_per_device or 1) * world.world_size,
        "difference": difference,
        "holds": difference <= 1e-10,
    }


def _check_alone(
    name: str, schedule: str, stages_per_device: int | None, setting: Setting
) -> Row:
    """The same with this process as the only worker."""
    if setting.quick and name != "perceptron" and schedule != "1f1b":
        return {"skipped": "takes long"}
    world = single_process_world(setting.device)
    num_steps = setting.size(NUM_STEPS, NUM_QUICK_STEPS)
    return check_exact(world, name, schedule, stages_per_device, num_steps)


CHECKS: Final[Checks] = {
    f"{name}, {schedule}": partial(_check_alone, name, schedule, stages_per_device)
    for name in SPECIMENS
    for schedule, stages_per_device in ORDERS
}


def check_spans(
    pipeline: hocket.Pipeline, batch: Any, num_workers: int
) -> dict[str, Any]:
    """See whether the ops of each lane follow each other, and fill the step's time.

    Returns:
        Of some steps the longest overlap of two ops, the longest makespan and the
        largest sum of a lane's ops, both as shares of the step's time; and whether
        there is no overlap, the makespan is within the step's time, and the sum is
        most of it where there is no bubble: on one device.
    """
    overlap_s, makespan, busy = 0.0, 0.0, 0.0
    for _ in range(NUM_TIMED):
        step_s = pipeline.step(batch).seconds
        timeline = pipeline.measured()
        makespan = max(makespan, timeline.makespan_s / step_s)
        for lane, starts_s, ends_s in zip(
            timeline.schedule.lanes, timeline.start_s, timeline.end_s, strict=True
        ):
            works = np.array([op.kind not in ASYNCHRONOUS for op in lane.ops])
            starts_s, ends_s = starts_s[works], ends_s[works]
            overlap_s = max(overlap_s, float((ends_s[:-1] - starts_s[1:]).max()))
            busy = max(busy, float((ends_s - starts_s).sum()) / step_s)
    return {
        "overlap_us": round(overlap_s * 1e6, 2),
        "makespan_share": round(makespan, 3),
        "busy_share": round(busy, 3),
        "holds": overlap_s < 1e-6
        and makespan <= 1.05
        and (busy >= MIN_BUSY or num_workers > 1),
    }


def _batches(specimen: Specimen, device: torch.device, num_steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    drawn = [specimen.draw(BATCH_SIZE, generator) for _ in range(num_steps)]
    return [(x.to(device), y.to(device)) for x, y in drawn]


def _model(specimen: Specimen, device: torch.device) -> nn.Module:
    torch.manual_seed(7)
    return specimen.make().double().to(device)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


@cache
def _plain(name: str, device: torch.device, num_steps: int) -> dict[str, Tensor]:
    specimen = SPECIMENS[name]
    model = _model(specimen, device).train()
    optimizer = _optimizer(model.parameters())
    for x, y in _batches(specimen, device, num_steps):
        for part in split_batch((x, y), NUM_MICROBATCHES):
            loss = nn.functional.cross_entropy(model(*part.leaves), part.targets)
            (loss * (part.num_samples / len(x))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _piped(
    specimen: Specimen,
    batches: list[Batch],
    world: World,
    schedule: str,
    stages_per_device: int | None,
) -> dict[str, Tensor]:
    pipeline = hocket.Pipeline(
        _model(specimen, world.device),
        nn.functional.cross_entropy,
        optimizer=_optimizer,
        example=batches[0],
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        stages_per_device=stages_per_device,
        world=world,
    )
    for batch in batches:
        pipeline.step(batch)
    state = pipeline.state_dict()
    pipeline.close()
    return state


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm().clamp_min(1e-30))
