"""What the workers of the checkpoint tests do."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.errors import CheckpointError
from hocket.run.cluster.world import World, join_world
from tests.run.checkpoint.faults import CHANGING, disk_is_full, struck
from tests.run.support.captured_once import captured_once
from tests.run.support.forked import mark_fault
from tests.run.support.joined import join
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.support.started import started

NUM_STEPS = 5
SAVED_AT = 3


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Two groups: vectors are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


def make_scheduler(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.lr_scheduler.LRScheduler:
    """A warm-up, then steps: schedules within a schedule."""
    lr = torch.optim.lr_scheduler
    parts = [
        lr.LinearLR(optimizer, start_factor=0.1, total_iters=2),
        lr.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5),
    ]
    return lr.SequentialLR(optimizer, parts, milestones=[2])


def make_pipeline(
    world: World | None, case: dict[str, Any], model: nn.Module | None = None
) -> hocket.Pipeline:
    """The case's pipeline; its weights begin as they do everywhere, or are given."""
    name = case["model"]
    with captured_once() as shelf:
        return started(
            model or shelf.model(name, partial(make_model, name)),
            ZOO[name].loss,
            make_optimizer,
            data_of(case)[0],
            scheduler=make_scheduler,
            schedule=case.get("schedule", "1f1b"),
            num_microbatches=case.get("num_microbatches", 4),
            num_replicas=case.get("num_replicas", 1),
            stages_per_device=case.get("stages_per_device"),
            cut=case.get("cut"),
            ema_decay=0.9,
            clip_norm=1.0,
            seed=case.get("seed", 0),
            profile_dir=case.get("profiles"),
            world=world,
        )


def data_of(case: dict[str, Any]) -> list[Any]:
    """The batches of the run; their microbatches have a form that is kept ready."""
    return batches(case["model"], NUM_STEPS, 16, 16)


def train_and_save(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train all steps; save on the way, in the background where the case says so."""
    world = join()
    pipeline = make_pipeline(world, case)
    losses = []
    for step, batch in enumerate(data_of(case)):
        if step == SAVED_AT:
            pipeline.save(
                folder, data={"next": step}, background=case.get("background", False)
            )
        losses.append(pipeline.step(batch).loss)
    evaluated = pipeline.evaluate(data_of(case)[:2]).loss
    weights = sums_of(pipeline.state_dict())
    pipeline.close()
    return {"losses": losses, "evaluated": evaluated, "weights": weights}


def load_and_train(case: dict[str, Any], folder: str, again: str) -> dict[str, Any]:
    """Load, save once more to another folder, and train the rest."""
    world = join()
    pipeline = make_pipeline(world, case)
    pipeline.step(data_of(case)[0])  # so that there is something to replace
    data = pipeline.load(folder)
    pipeline.save(again, data=data)
    losses = [pipeline.step(batch).loss for batch in data_of(case)[data["next"] :]]
    evaluated = pipeline.evaluate(data_of(case)[:2]).loss
    weights = sums_of(pipeline.state_dict())
    pipeline.close()
    return {"losses": losses, "evaluated": evaluated, "weights": weights}


def sums_of(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """A number for each tensor."""
    return {name: float(x.double().sum()) for name, x in state.items()}


def one_cannot_write(case: dict[str, Any], folder: str) -> list[Any]:
    """Rank 1's disk is full at the second save; training goes on all the same."""
    world = join_world()
    pipeline = make_pipeline(world, case)
    reported: list[Any] = []
    for step, batch in enumerate(data_of(case)):
        if step == 2:
            at = 3 if world.rank == 1 else 0
            with struck(at, CHANGING, disk_is_full):
                reported.append(error_of(pipeline, folder))
        else:
            reported.append(error_of(pipeline, folder))
        reported.append(pipeline.step(batch).loss)
    pipeline.close()
    return reported


def error_of(pipeline: hocket.Pipeline, folder: str) -> str:
    """What a save says."""
    try:
        pipeline.save(folder, keep=None)
    except CheckpointError as error:
        return str(error)
    return ""


def die_while_others_write(case: dict[str, Any], folder: str) -> None:
    """Rank 1 is killed between two saves in the background."""
    world = join_world()
    pipeline = make_pipeline(world, case)
    for step, batch in enumerate(data_of(case)):
        pipeline.step(batch)
        if step == 3 and world.rank == 1:
            mark_fault(Path(folder).parent, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        pipeline.save(folder, data=step, background=True)
