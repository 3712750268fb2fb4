"""What the workers of the exactness tests do: train, and leave their state behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import hocket
from hocket.run.world import World, join_world
from tests.run.plain_loop import make_optimizer
from tests.run.zoo import ZOO, batches, make_model


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job; rank 0's answers are compared with the oracle."""
    torch.set_num_threads(1)
    world = join_world()
    return [_train(world, case, Path(folder) / f"{i}") for i, case in enumerate(cases)]


def _train(world: World, case: dict[str, Any], stem: Path) -> dict[str, Any]:
    name = case["model"]
    data = batches(name, case["num_steps"], case["batch_size"], case["last"])
    pipeline = hocket.Pipeline(
        make_model(name),
        ZOO[name].loss,
        optimizer=make_optimizer,
        example=data[0],
        schedule=case["schedule"],
        num_microbatches=case["num_microbatches"],
        num_replicas=case["num_replicas"],
        stages_per_device=case.get("stages_per_device"),
        profile_dir=stem.parent / "profiles",
        world=world,
        transport=case.get("transport", "auto"),
    )
    history = [result.losses for result in pipeline.train(data)]
    evaluated = pipeline.evaluate(data)
    state = pipeline.state_dict()
    if world.rank == 0:
        _save(state, stem)
    answer = {
        "history": history,
        "evaluated": evaluated.losses,
        "num_samples": evaluated.num_samples,
        "boundaries": list(pipeline.plan.boundaries),
        "measured_ops": sum(1 for _ in pipeline.measured().spans),
    }
    pipeline.close()
    return answer


def _save(state: dict[str, torch.Tensor], stem: Path) -> None:
    save_file({name: t.clone().contiguous() for name, t in state.items()}, f"{stem}.st")
