"""What workers on a stand-in for a GPU do; each is a process of its own."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import ModelError, NonFiniteError
from hocket.run.cluster.world import World, join_world
from hocket.run.data.batch import on_device
from hocket.run.tune import dry_run
from hocket.run.weights.updater import Updater
from tests.run.support.captured_once import Shelf, captured_once
from tests.run.support.comparison import difference
from tests.run.support.exactness import train_one
from tests.run.support.plain_loop import make_optimizer
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.small_models import batches, make_model, specimen_of
from tests.run.support.stand_in_device import StandInTensor, register
from tests.run.support.stand_in_stream import STREAM, StandInEvent
from tests.run.support.started import started
from tests.run.support.teacher_models import largest_difference, make_batches
from tests.run.support.teacher_workers import make_pipeline


def on_one_worker(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """All that one worker is asked for: to start a process takes longer than that."""
    world = _world()
    return {
        "memory": _early_and_late(world.device, 3),
        "waits": _waits_by_step(world, "perceptron", "1f1b"),
        "broken": _broken_step(world, "gradient", "AdamW"),
        "uneven": _broken_step(world, "counts", "AdamW"),
        "trained": _train_all(world, cases, folder),
        "dry_run_s": _dry_run_s(world),
    }


def more_waits(schedules: list[str]) -> list[list[list[int]]]:
    """What is queued behind each wait of the host, by schedule and step."""
    world = _world()
    return [_waits_by_step(world, "perceptron", schedule) for schedule in schedules]


def more_broken_steps(cases: list[list[str]]) -> list[dict[str, Any]]:
    """What steps leave whose gradient or loss is not finite."""
    world = _world()
    return [_broken_step(world, *case) for case in cases]


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
        started(
            torch.nn.Linear(2, 2),
            torch.nn.functional.mse_loss,
            make_optimizer,
            example,
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "AdamW by default": make_optimizer,  # the host judges its gradients
}


def _waits_by_step(world: World, name: str, schedule: str) -> list[list[int]]:
    """What is queued behind each wait of the host, in each of six steps.

    From the third step on, waits with little behind them are errors.
    """
    data = batches(name, 6, 8, 8)
    found = []
    waits = STREAM.waits
    with started(
        make_model(name),
        specimen_of(name).loss,
        OPTIMIZERS["AdamW"],
        data[0],
        scheduler=lambda x: torch.optim.lr_scheduler.StepLR(x, 2),
        schedule=schedule,
        num_microbatches=4,
        clip_norm=1.0,
        ema_decay=0.9,
        world=world,
    ) as pipeline:
        results = []
        for result in pipeline.train(on_device(data, world.device)):
            results.append(result)
            found.append(list(waits.queued))
            waits.clear()
            waits.are_errors = 2 <= len(results) < len(data) - 1
        assert all(math.isfinite(result.loss) for result in results)
    return found


class _Breaks(nn.Module):
    """A layer whose gradient, or value, is not finite where an input is negative."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, times a root whose slope at 0 is infinite."""
        y: Tensor = self.layer(x.abs())
        if self.what == "counts":
            return y
        low = x.amin().clamp(max=0.0).abs()  # 0 in good batches
        if self.what == "loss":
            return y + (1.0 / (1.0 - low)).log()
        bad = (low > 0.0).to(x.dtype)
        return y + (y * 0.0 + 1.0 - bad).sqrt()


def _broken_step(world: World, what: str, name: str) -> dict[str, Any]:
    """What a step leaves whose gradient or loss is not finite: the third of six.

    Or one whose microbatches divide by other counts of targets.

    Returns:
        The error, the number of steps that were yielded, and for weights, moments and
        averages whether they are those of behind the second step; and whether training
        up to it equals the plain loop.
    """
    torch.manual_seed(1)
    data = [(torch.rand(8, 3).double(), torch.rand(8, 3).double()) for _ in range(6)]
    data[2][0][5] = -1.0
    loss: Any = F.mse_loss
    if what == "counts":
        data = [(x, y.argmax(1)) for x, y in data]
        data[2][1][5], loss = -100, F.cross_entropy
    model, plain = _Breaks(what).double(), _Breaks(what).double()
    plain.load_state_dict(model.state_dict())
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(OPTIMIZERS[name](parameters))
        return made[-1]

    num_yielded, states = 0, []
    pipeline = started(
        model, loss, make, data[0], clip_norm=0.5, ema_decay=0.9, world=world
    )
    (updater,) = pipeline._executor.updaters.values()
    try:
        for _ in pipeline.train(data):
            num_yielded += 1
            if num_yielded == 2:
                states.append(_state_of(updater))
    except (NonFiniteError, ModelError) as error:
        message = str(error)
    states.append(_state_of(updater))
    optimizer = OPTIMIZERS[name](plain.parameters())
    averages = {key: p.detach().clone() for key, p in plain.named_parameters()}
    for x, y in data[:2]:
        optimizer.zero_grad()
        loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        for key, p in plain.named_parameters():
            averages[key].lerp_(p.detach(), 1.0 - 0.9)
    before, after = states
    return {
        "error": message,
        "num_yielded": num_yielded,
        "changed": [key for key, x in before.items() if not torch.equal(x, after[key])],
        "off": max(
            float((x.detach() - before[prefix + key]).abs().max())
            for prefix, named in (
                ("", dict(plain.named_parameters())),
                ("average of ", averages),
            )
            for key, x in named.items()
        ),
    }


def _state_of(updater: Updater) -> dict[str, Tensor]:
    """Copies of weights, moments and averages, on the host."""
    assert updater.optimizer is not None
    assert updater.ema is not None
    found: dict[str, Tensor] = {}
    for name, p in updater.parameters.items():
        found[name] = p.detach().cpu()
        found[f"average of {name}"] = updater.ema[name].cpu()
        for key, x in updater.optimizer.state[p].items():
            found[f"{key} of {name}"] = x.cpu()
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
    gc.freeze()  # the collector skips what is imported
    measure_shortly(pytest.MonkeyPatch())
    return replace(join_world(device="cpu"), device=device)
