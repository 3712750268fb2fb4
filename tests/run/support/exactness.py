"""What the workers of the exactness tests do: train, and leave their state behind."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

import hocket
from hocket.run.cluster.world import World
from hocket.run.stage.compiled.function import CompiledFunction
from tests.run.support.captured_once import captured_once
from tests.run.support.joined import join
from tests.run.support.plain_loop import make_optimizer
from tests.run.support.small_models import batches, make_model, specimen_of
from tests.run.support.started import started

# Batches that a trained model is evaluated on, the last and smaller one among them.
NUM_EVALUATED: Final = 3


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job; rank 0's answers are compared with the oracle."""
    world = join()
    answers = []
    with captured_once() as shelf:
        for i, case in enumerate(cases):
            name = case["model"]
            model = shelf.model(name, partial(make_model, name))
            answers.append(train_one(world, case, Path(folder) / f"{i}", model))
    return answers


def train_one(
    world: World, case: dict[str, Any], stem: Path, model: nn.Module
) -> dict[str, Any]:
    """Train and evaluate; rank 0 leaves the trained state in a file.

    A schedule of several lines is an order as text; otherwise it is a name.
    """
    name = case["model"]
    data = batches(name, case["num_steps"], case["batch_size"], case["last"])
    order = case["schedule"]
    pipeline = started(
        model,
        specimen_of(name).loss,
        make_optimizer,
        data[0],
        schedule=hocket.Schedule.parse(order) if "\n" in order else order,
        num_microbatches=case["num_microbatches"],
        num_replicas=case["num_replicas"],
        stages_per_device=case.get("stages_per_device"),
        cut=case.get("cut"),
        profile_dir=stem.parent / "profiles",
        world=world,
        transport=case.get("transport", "auto"),
        recompute=case.get("recompute", "none"),
        compile=case.get("compile", False),
    )
    history = [result.losses for result in pipeline.train(data)]
    if case.get("compile"):
        _check_compiled(pipeline)
    evaluated = pipeline.evaluate(data[-NUM_EVALUATED:])
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
        "weights": weight_digests(pipeline),
        "num_copies": num_copies(state),
    }
    pipeline.close()
    return answer


def _check_compiled(pipeline: hocket.Pipeline) -> None:
    """What was compiled ran, and not the stages as they are."""
    for runner in pipeline._executor.runners.values():
        function = runner.module.training_code.function
        assert isinstance(function, CompiledFunction)
        assert function.num_calls > 0


def weight_digests(pipeline: hocket.Pipeline) -> dict[str, int]:
    """Of this worker's own weights, by name: those of replicas have the same bits."""
    return {
        name: zlib.crc32(_bytes(parameter))
        for runner in pipeline._executor.runners.values()
        for name, parameter in runner.module.named_parameters()
    }


def num_copies(state: dict[str, torch.Tensor]) -> int:
    """Tensors of a state; a tied one counts once, whatever its names."""
    return len({tensor.data_ptr() for tensor in state.values()})


def _save(state: dict[str, torch.Tensor], stem: Path) -> None:
    save_file({name: t.clone().contiguous() for name, t in state.items()}, f"{stem}.st")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
