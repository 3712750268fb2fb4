"""What the workers of the exactness tests do: train, and leave their state behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import hocket
from hocket.run.world import World, join_world
from tests.run.plain_loop import make_optimizer
from tests.run.zoo import batches, make_model, specimen_of


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job; rank 0's answers are compared with the oracle."""
    torch.set_num_threads(1)
    world = join_world()
    return [
        train_one(world, case, Path(folder) / f"{i}", make_model(case["model"]))
        for i, case in enumerate(cases)
    ]


def train_one(
    world: World, case: dict[str, Any], stem: Path, model: nn.Module
) -> dict[str, Any]:
    """Train and evaluate; rank 0 leaves the trained state in a file.

    A schedule of several lines is an order as text; otherwise it is a name.
    """
    name = case["model"]
    data = batches(name, case["num_steps"], case["batch_size"], case["last"])
    order = case["schedule"]
    pipeline = hocket.Pipeline(
        model,
        specimen_of(name).loss,
        optimizer=make_optimizer,
        example=data[0],
        schedule=hocket.Schedule.parse(order) if "\n" in order else order,
        num_microbatches=case["num_microbatches"],
        num_replicas=case["num_replicas"],
        stages_per_device=case.get("stages_per_device"),
        cut=case.get("cut"),
        profile_dir=stem.parent / "profiles",
        world=world,
        transport=case.get("transport", "auto"),
        recompute=case.get("recompute", "none"),
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
        "trained": [x.trainable for x in pipeline.plan.schedule.program.stages],
    }
    pipeline.close()
    return answer


def _save(state: dict[str, torch.Tensor], stem: Path) -> None:
    save_file({name: t.clone().contiguous() for name, t in state.items()}, f"{stem}.st")
