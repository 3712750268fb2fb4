"""What is measured side by side, in the same two processes.

    plain       worker 0: the whole batch, two threads      worker 1: waits, asleep
    ddp         worker 0: one half, one thread              worker 1: the other half
    a pipeline  worker 0: the first stages, one thread      worker 1: the last stages

All train the same model on the same batch with AdamW. What a worker holds is counted
alike: the tensors that it has between two steps, and the most that a step adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import hocket
from bench.in_turn import Order
from bench.live_bytes import alive, step_bytes
from bench.zoo.architecture import Architecture
from hocket.model.profile.allocations import allocations
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch, call_arguments, split_batch
from hocket.run.data.loss import TOTAL, losses_of

Step = Callable[[], object]

NUM_WARM: Final = 2  # steps, after which optimizers have their state


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to train, on this worker.

    Args:
        step: trains one step.
        peak_bytes: that this worker held at most in a step.
    """

    step: Step
    peak_bytes: int


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def model_of(architecture: Architecture) -> nn.Module:
    """The same weights each time, on every worker."""
    torch.manual_seed(0)
    return architecture.make()


def plain(architecture: Architecture, batch: Any, world: World) -> Contestant:
    """Worker 0 alone, with as many threads as there are workers."""
    if world.rank:
        return Contestant(lambda: None, 0)
    whole = split_batch(batch, 1)[0]
    alone = _watched(lambda: _loop(architecture, model_of(architecture), batch, whole))

    def step() -> None:
        torch.set_num_threads(world.world_size)
        alone.step()
        torch.set_num_threads(1)

    return Contestant(step, alone.peak_bytes)


def data_parallel(architecture: Architecture, batch: Any, world: World) -> Contestant:
    """A whole copy on each worker, for its part of the batch."""
    part = split_batch(batch, world.world_size)[world.rank]

    def make() -> Step:
        model = DistributedDataParallel(model_of(architecture), **architecture.ddp)
        return _loop(architecture, model, batch, part)

    return _watched(make)


def pipeline_of(
    architecture: Architecture, batch: Any, world: World, order: Order, folder: str
) -> tuple[hocket.Pipeline, Contestant]:
    """A pipeline that has trained a few steps.

    Args:
        architecture: what to train.
        batch: the example, and what it has trained on.
        world: its workers.
        order: what it plays.
        folder: where a profile is kept for the pipelines that follow.
    """
    users = [*alive().values()]
    model = model_of(architecture)
    pipeline = hocket.Pipeline(
        model,
        architecture.loss,
        optimizer=adamw,
        example=batch,
        schedule=order.schedule,
        num_microbatches=architecture.num_microbatches,
        stages_per_device=order.stages_per_device,
        cut=architecture.cut,
        profile_dir=folder,
        world=world,
    )
    for _ in range(NUM_WARM):
        pipeline.step(batch)
    found = step_bytes(pipeline, model, batch, users)
    return pipeline, Contestant(lambda: pipeline.step(batch), found.peak_bytes)


def _loop(
    architecture: Architecture, model: nn.Module, batch: Any, part: Microbatch
) -> Step:
    """The usual training loop, on one part of the batch."""
    spec = pytree.tree_structure(call_arguments(batch[0]))
    args, kwargs = pytree.tree_unflatten(part.leaves, spec)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model.train()

    def step() -> None:
        output = model(*args, **kwargs)
        losses_of(architecture.loss, output, part.targets)[TOTAL].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _watched(make: Callable[[], Step]) -> Contestant:
    """From all that the allocator gave out since before the model was made."""
    with allocations(torch.device("cpu")) as log:
        with log.span():
            step = make()
            for _ in range(NUM_WARM):
                step()
        with log.span():
            step()
    return Contestant(step, log.left[0] + log.peaks[1])
