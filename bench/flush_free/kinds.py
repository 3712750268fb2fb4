"""What a worker holds at most while it trains, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.flush_free.field import order_of
from bench.live_bytes import distinct_bytes, play_bytes
from bench.models import Case
from bench.pipeline_vs_torch.gradients import model_of
from hocket.run.cluster.world import World

_NUM_WARM: Final = 3  # steps, after which all old versions are there
_NUM_STEPS: Final = 4


@dataclass(frozen=True, slots=True)
class Kinds:
    """The bytes of one worker.

    Args:
        weight_bytes: the newest, and buffers.
        version_bytes: older ones that are still read.
        gradient_bytes: of all weights.
        optimizer_bytes: its state.
        other_bytes: what is left of the peak: what forwards left for their backwards,
            what an op takes while it runs, messages.
        peak_bytes: the most at once, as the allocator has it, but for batches.
        predicted_bytes: that, before the first step.
    """

    weight_bytes: int
    version_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    other_bytes: int
    peak_bytes: int
    predicted_bytes: int


def measure(
    world: World, case: Case, schedule: str, num_microbatches: int, folder: str
) -> dict[str, Any]:
    """One row of all workers. Every worker must call this.

    Args:
        world: two workers.
        case: the model, and the size of a microbatch.
        schedule: by name.
        num_microbatches: of a step.
        folder: for the profile.
    """
    case = replace(case, num_microbatches=num_microbatches)
    batch = case.batch()
    with hocket.Pipeline(
        model_of(case),  # nothing else refers to it: other workers' stages are freed
        # Comparing losses with the batch's, in some steps, takes memory of its own.
        hocket.PerMicrobatch(case.loss),
        optimizer=adamw,
        example=batch,
        schedule=order_of(schedule, num_microbatches),
        num_microbatches=num_microbatches,
        profile_dir=folder,
        world=world,
    ) as pipeline:
        _train(pipeline, [batch] * _NUM_WARM)
        own = asdict(_kinds(pipeline, batch, world.rank))
        devices = world.gather_json(own, "kinds")
    return {
        "case": case.name,
        "schedule": schedule,
        "num_microbatches": num_microbatches,
        "devices": devices,
    }


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose state is twice the weights."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def _kinds(
    pipeline: hocket.Pipeline, batch: tuple[Tensor, Tensor], device: int
) -> Kinds:
    batches = [batch] * _NUM_STEPS
    peak = play_bytes(pipeline, None, lambda: _train(pipeline, batches), batch)
    # Batches are the user's; of those that are read ahead there are copies.
    plan = pipeline._executor.plan
    num_copies = plan.num_steps if plan.overlaps else 0
    peak_bytes = peak.peak_bytes - num_copies * distinct_bytes(batch)
    runners = pipeline._executor.runners.values()
    modules = [runner.module for runner in runners]
    weights = [
        x for module in modules for x in (*module.parameters(), *module.buffers())
    ]
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    parts = (
        distinct_bytes(weights),
        distinct_bytes([*weights, *_old(pipeline)]) - distinct_bytes(weights),
        sum(p.nbytes for p in trained),
        distinct_bytes(_states(pipeline)),
    )
    return Kinds(
        *parts,
        peak_bytes - sum(parts),
        peak_bytes,
        round(pipeline.predicted.peak_bytes(device)),
    )


def _train(pipeline: hocket.Pipeline, batches: Sequence[Any]) -> None:
    for _ in pipeline.train(batches):
        pass


def _old(pipeline: hocket.Pipeline) -> Iterator[Tensor]:
    for runner in pipeline._executor.runners.values():
        if runner.versions is not None:
            for version in runner.versions.old():
                yield from version.values()


def _states(pipeline: hocket.Pipeline) -> Iterator[Tensor]:
    for updater in pipeline._executor.updaters.values():
        if updater.optimizer is not None:
            for state in updater.optimizer.state.values():
                yield from (x for x in state.values() if isinstance(x, Tensor))
