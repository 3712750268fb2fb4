"""What the workers of the flush-free tests do: train, and leave their state behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import hocket
from hocket.errors import HocketError
from hocket.run.cluster.world import World
from hocket.run.engine.sync.step_result import StepResult
from tests.run.support.captured_once import captured_once
from tests.run.support.exactness import NUM_EVALUATED, weight_digests
from tests.run.support.joined import join
from tests.run.support.small_models import batches, make_model, specimen_of
from tests.run.support.started import started
from tests.run.support.training_workers import fragile_batches, make_fragile

POISONED: Final = 3  # the step whose gradient is no number
FRAGILE_CUT: Final = ["2", "4", "6"]
SETTINGS = (
    *("clip_norm", "ema_decay", "recompute", "transport"),
    *("stages_per_device", "num_replicas"),
)


def optimizer_of(name: str) -> Any:
    """By one word."""
    if name == "sgd":
        return partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Both groups' learning rates move once per step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, 0.1 + t / 8))


def data_of(case: dict[str, Any]) -> list[Any]:
    """The last batch is smaller."""
    return batches(
        case["model"],
        case["num_steps"],
        case.get("batch_size", 14),
        case.get("last", 9),
    )


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job."""
    world = join()
    with captured_once() as shelf:
        answers = []
        for i, case in enumerate(cases):
            make = partial(make_model, case["model"])
            model = shelf.model(case["model"], make)
            answers.append(_train(world, case, Path(folder) / f"{i}", model))
    return answers


def _train(
    world: World, case: dict[str, Any], stem: Path, model: torch.nn.Module
) -> dict[str, Any]:
    data = data_of(case)
    schedule = case["schedule"]
    pipeline = started(
        model,
        specimen_of(case["model"]).loss,
        optimizer_of(case.get("optimizer", "adamw")),
        data[0],
        scheduler=warm_up if case.get("scheduler") else None,
        schedule=hocket.Schedule.parse(schedule) if "\n" in schedule else schedule,
        num_microbatches=case["num_microbatches"],
        profile_dir=stem.parent / "profiles",
        world=world,
        **{key: case[key] for key in SETTINGS if key in case},
    )
    results = _played(pipeline, data, case)
    state = pipeline.state_dict()
    if world.rank == 0:
        _save(state, stem)
    answer: dict[str, Any] = {
        "steps": [result.step for result in results],
        "losses": [result.losses for result in results],
        "norms": [result.grad_norm for result in results],
        "sizes": [result.num_samples for result in results],
        "stage_names": list(pipeline.plan.stage_names),
        "delays": [x.delay for x in pipeline.plan.schedule.program.stages],
        "measured_ops": sum(1 for _ in pipeline.measured().spans),
        "old_copies": _old_copies(pipeline),
        "held": [[*x.parameters] for x in pipeline._executor.runners.values()],
        "weights": weight_digests(pipeline),
    }
    evaluated = pipeline.evaluate(data[-NUM_EVALUATED:])
    answer |= {"evaluated": evaluated.losses, "num_samples": evaluated.num_samples}
    pipeline.close()
    return answer


def _played(
    pipeline: hocket.Pipeline, data: list[Any], case: dict[str, Any]
) -> list[StepResult]:
    """As the case wants it: in one go, with pauses, or step by step."""
    if case.get("by_step"):
        return [pipeline.step(batch) for batch in data]
    results = []
    for result in pipeline.train(data, drain_every=case.get("drain_every")):
        results.append(result)
        if result.step in case.get("evaluate_after", ()):
            pipeline.evaluate(data[:1])
    return results


def _old_copies(pipeline: hocket.Pipeline) -> list[float]:
    """Bytes of old weights, over those of the weights, of each of these stages."""
    copies = []
    for runner in pipeline._executor.runners.values():
        own = sum(p.nbytes for p in runner.parameters.values())
        old = 0 if runner.versions is None else runner.versions.num_bytes
        copies.append(old / own)
    return copies


def _save(state: dict[str, Tensor], stem: Path) -> None:
    save_file({name: t.clone().contiguous() for name, t in state.items()}, f"{stem}.st")


def make_fragile_stages() -> torch.nn.Sequential:
    """Four stages, of which the second has nothing to train."""
    layers = make_fragile()
    layers[2].requires_grad_(requires_grad=False)
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(3, 3).double())


def fragile() -> list[Any]:
    """Train until a gradient of the first stage is no number, but the loss is one.

    Returns:
        The losses that this worker got, and the first stage's weights.
    """
    torch.set_num_threads(1)
    model = make_fragile_stages()
    data = fragile_batches(8, poisoned=POISONED)
    try:
        with started(
            model,
            torch.nn.functional.cross_entropy,
            partial(torch.optim.SGD, lr=0.1),
            data[0],
            schedule="wpipe",
            cut=FRAGILE_CUT,
        ) as pipeline:
            list(pipeline.train(data))
    except HocketError as error:
        return [
            type(error).__name__,
            str(error),
            model.get_parameter("0.weight").tolist(),
        ]
    return []
