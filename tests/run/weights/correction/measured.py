"""What the workers of the memory test of corrections do: train, see what they hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.live_bytes import distinct_bytes, play_bytes
from hocket.core.timelines.peak import peak_parts
from hocket.run.cluster.world import World, join_world
from tests.run.support.optimizers import OPTIMIZERS

WIDTH: Final = 256  # so that weights are nearly all that there is


def measure_all(runs: list[list[str]], folder: str) -> list[list[dict[str, Any]]]:
    """Of each run (schedule, correction, optimizer) what each device held at most."""
    torch.set_num_threads(1)
    world = join_world()
    return [_measure(world, run, folder) for run in runs]


def _measure(world: World, run: list[Any], folder: str) -> list[Any]:
    schedule, correction, optimizer = run
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with hocket.Pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))),
        nn.functional.mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        example=batch,
        schedule=schedule,
        num_microbatches=2,
        cut=["2", "4", "6"] if schedule == "wpipe" else ["4"],
        correction=correction,
        profile_dir=folder,
        world=world,
    ) as pipeline:
        for _ in pipeline.train([batch] * 3):
            pass

        def play() -> None:
            for _ in pipeline.train([batch] * 4):
                pass

        peak = play_bytes(pipeline, None, play, batch)
        parts = peak_parts(pipeline.predicted, pipeline.plan.costs)
        own: dict[str, Any] = {
            "predicted": asdict(parts[world.rank]),
            "weight_bytes": distinct_bytes(_weights(pipeline)),
            "optimizer_bytes": distinct_bytes(_kept(pipeline)),
            "peak_bytes": peak.peak_bytes,
        }
        return world.gather_json(own, "memory")


def _weights(pipeline: hocket.Pipeline) -> list[Tensor]:
    runners = pipeline._executor.runners.values()
    return [p for runner in runners for p in runner.module.parameters()]


def _kept(pipeline: hocket.Pipeline) -> list[Tensor]:
    """By optimizers and corrections."""
    found: list[Tensor] = []
    for updater in pipeline._executor.updaters.values():
        assert updater.optimizer is not None
        for state in updater.optimizer.state.values():
            found += [x for x in state.values() if isinstance(x, Tensor)]
        if updater.correction is not None:
            for kept in updater.correction.state_dict()["kept"].values():
                found += kept
    return found
