"""What workers on a stand-in for a GPU do; each is a process of its own."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import hocket
from hocket.run.cluster.world import World, join_world
from tests.run.support.captured_once import captured_once
from tests.run.support.exactness import train_one
from tests.run.support.plain_loop import make_optimizer
from tests.run.support.small_models import batches, make_model, specimen_of
from tests.run.support.stand_in_device import STREAM, register


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case on the device."""
    world = _world()
    answers = []
    with captured_once():
        for i, case in enumerate(cases):
            model = make_model(case["model"])
            answers.append(train_one(world, case, Path(folder) / f"{i}", model))
    return answers


def waits_by_step(name: str, schedule: str) -> list[dict[str, list[Any]]]:
    """What the host waits for in each of four steps."""
    world = _world()
    data = batches(name, 4, 8, 8)
    found = []
    with hocket.Pipeline(
        make_model(name),
        specimen_of(name).loss,
        optimizer=make_optimizer,
        example=data[0],
        schedule=schedule,
        num_microbatches=4,
        clip_norm=1.0,
        world=world,
    ) as pipeline:
        STREAM.waits.clear()
        for _ in pipeline.train(data):
            waits = STREAM.waits
            found.append(asdict(waits))
            waits.clear()
    return found


def plan_by_trials(name: str) -> list[str]:
    """Plan for the workers of this job, from measured steps; the best candidates."""
    world = _world()
    ranking = hocket.plan(
        make_model(name),
        batches(name, 1, 8, 8)[0],
        num_devices=world.world_size,
        loss=specimen_of(name).loss,
        optimizer=make_optimizer,
        world=world,
    )
    return [str(outcome.candidate) for outcome in ranking.outcomes[:9]]


def _world() -> World:
    # Before the first backward: torch's autograd then starts a thread for each device.
    device = register()
    torch.set_num_threads(1)
    return replace(join_world(device="cpu"), device=device)
