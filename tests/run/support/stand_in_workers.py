"""What workers on a stand-in for a GPU do; each is a process of its own."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

import hocket
from hocket.run.cluster.world import World, join_world
from hocket.run.tune import dry_run
from tests.run.support.captured_once import Shelf, captured_once
from tests.run.support.comparison import difference
from tests.run.support.exactness import train_one
from tests.run.support.plain_loop import make_optimizer
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.small_models import batches, make_model, specimen_of
from tests.run.support.stand_in_device import StandInTensor, register
from tests.run.support.stand_in_stream import STREAM, StandInEvent
from tests.run.support.teacher_models import largest_difference, make_batches
from tests.run.support.teacher_workers import make_pipeline


def on_one_worker(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """All that one worker is asked for: to start a process takes longer than that."""
    world = _world()
    return {
        "memory": _early_and_late(world.device, 3),
        "waits": _waits_by_step(world, "perceptron", "1f1b"),
        "trained": _train_all(world, cases, folder),
        "dry_run_s": _dry_run_s(world),
    }


def _dry_run_s(world: World) -> float:
    """The seconds of a dry run where each of the host's waits takes 20 ms."""
    played, spent_s = dry_run._played, list[float]()

    def timed(*args: Any) -> Any:
        begin_s = perf_counter()
        rounds = played(*args)
        spent_s.append(perf_counter() - begin_s)
        return rounds

    example = torch.randn(4, 2), torch.randn(4, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "_ENOUGH_S", 0.6)
        patch.setattr(dry_run, "_played", timed)
        patch.setattr(dry_run, "is_precise", lambda columns: False)
        patch.setattr(StandInEvent, "turn_s", 0.02)
        hocket.Pipeline(
            torch.nn.Linear(2, 2),
            torch.nn.functional.mse_loss,
            optimizer=make_optimizer,
            example=example,
            num_microbatches=2,
            world=world,
        ).close()
    [found] = spent_s
    return found


def _early_and_late(device: torch.device, num: int) -> list[list[float]]:
    """A sum's memory when it is queued, its value, and a copy's memory and value."""
    total = torch.ones(num).to(device) + torch.ones(num).to(device)
    assert isinstance(total, StandInTensor)
    seen = [total.raw.tolist()]
    host = torch.empty(num, pin_memory=True)
    host.copy_(total, non_blocking=True)
    event = torch.Event(device)
    event.record()
    seen.append(host.tolist())
    event.synchronize()
    return [*seen, total.tolist(), host.tolist()]


def train_twice(
    model: str, schedules: list[str], seed: int, settings: dict[str, Any]
) -> dict[str, float]:
    """Train on the CPU and on the device; the largest difference by schedule.

    Weights and buffers are compared, relative to the largest entry of each.
    """
    here = _world(seed)
    data = batches(model, 6, 16, 16)
    found = {}
    for schedule in schedules:
        states, losses = [], []
        cut: list[str] | None = None  # weights are stale by stage
        for world in (replace(here, device=torch.device("cpu")), here):
            with hocket.Pipeline(
                make_model(model),
                specimen_of(model).loss,
                optimizer=make_optimizer,
                example=data[0],
                schedule=schedule,
                cut=cut,
                world=world,
                **settings,
            ) as pipeline:
                plan = pipeline.plan
                if any(stage.delay for stage in plan.schedule.program.stages):
                    cut = list(plan.stage_names[1:])
                losses.append([result.loss for result in pipeline.train(data)])
                states.append({k: x.cpu() for k, x in pipeline.state_dict().items()})
        assert losses[1] == pytest.approx(losses[0], rel=1e-10), (schedule, losses)
        expected, actual = states
        found[schedule] = max(difference(actual[k], x) for k, x in expected.items())
    return found


def teachers_twice(cases: list[dict[str, Any]], folder: str) -> list[float]:
    """Train with teachers on the CPU and on the device; the largest differences."""
    here = _world()
    worlds = replace(here, device=torch.device("cpu")), here
    found = []
    for case in cases:
        states = []
        for world in worlds:
            with make_pipeline(case, world, Path(folder), Shelf()) as pipeline:
                losses = [result.loss for result in pipeline.train(make_batches())]
                losses.append(pipeline.evaluate(make_batches()[-2:]).loss)
                state = {k: x.cpu() for k, x in pipeline.state_dict().items()}
                states.append({**state, "losses": torch.tensor(losses)})
        found.append(largest_difference(states[1], states[0]))
    return found


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case on the device."""
    return _train_all(_world(), cases, folder)


def _train_all(
    world: World, cases: list[dict[str, Any]], folder: str
) -> list[dict[str, Any]]:
    answers = []
    with captured_once():
        for i, case in enumerate(cases):
            model = make_model(case["model"])
            answers.append(train_one(world, case, Path(folder) / f"{i}", model))
    return answers


def _waits_by_step(
    world: World, name: str, schedule: str
) -> list[dict[str, list[Any]]]:
    """What the host waits for in each of four steps."""
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


def _world(seed: int = 0) -> World:
    # Before the first backward: torch's autograd then starts a thread for each device.
    device = register(seed)
    torch.set_num_threads(1)
    measure_shortly(pytest.MonkeyPatch())
    return replace(join_world(device="cpu"), device=device)
