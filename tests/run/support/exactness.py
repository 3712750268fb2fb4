"""What the workers of the exactness tests do: train, and leave everything behind."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hocket
from hocket.run.cluster.world import World
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.stage.compiled.function import CompiledFunction
from tests.run.support.captured_once import captured_once
from tests.run.support.joined import join
from tests.run.support.optimizers import GRADIENTS, OPTIMIZERS, make_scheduler
from tests.run.support.plain_loop import data_of, loss_of, model_of

# Batches that a trained model is evaluated on, the last and smaller one among them.
NUM_EVALUATED: Final = 3
SETTINGS: Final = (
    *("accumulate", "clip_norm", "compile", "cut", "ema_decay", "precision"),
    *("num_shards", "recompute", "stages_per_device", "transport"),
)


def optimizer_of(case: dict[str, Any]) -> Any:
    """By one word; momentum shows what a stale gradient leaves behind."""
    if case.get("optimizer") == "momentum":
        return partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return OPTIMIZERS[case.get("optimizer", "adamw")]


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job; rank 0's answers are compared with the oracle."""
    world = join()
    answers = []
    with captured_once() as shelf:
        for i, case in enumerate(cases):
            name = ", ".join([case["model"], *filter(None, [case.get("precision")])])
            model = shelf.model(name, partial(model_of, case))
            answers.append(train_one(world, case, Path(folder) / f"{i}", model))
    return answers


def train_one(
    world: World, case: dict[str, Any], stem: Path, model: nn.Module
) -> dict[str, Any]:
    """Train and evaluate; rank 0 leaves the trained state in a file.

    A schedule of several lines is an order as text; otherwise it is a name.
    """
    data, order = data_of(case), case["schedule"]
    pipeline = hocket.Pipeline(
        model,
        loss_of(case),
        optimizer=optimizer_of(case),
        scheduler=make_scheduler if case.get("scheduler") else None,
        example=data[0],
        schedule=hocket.Schedule.parse(order) if "\n" in order else order,
        num_microbatches=case["num_microbatches"],
        num_replicas=case["num_replicas"],
        profile_dir=stem.parent / "profiles",
        world=world,
        **{key: case[key] for key in SETTINGS if key in case},
    )
    GRADIENTS.clear()  # those of measuring the update
    results = _played(pipeline, data, case)
    if case.get("compile"):
        _check_compiled(pipeline)
    old_copies = _old_copies(pipeline)
    state = pipeline.state_dict()
    _save(state, world, f"{stem}.st")
    averaged = _averaged(pipeline, data, stem) if "ema_decay" in case else None
    if case.get("optimizer") == "sgd":
        save_file(dict(_gradients(case)), f"{stem}.gradients-{world.rank}")
    evaluated = pipeline.evaluate(data[-NUM_EVALUATED:])
    stages = pipeline.plan.schedule.program.stages
    answer = {
        "steps": [result.step for result in results],
        "losses": [result.losses for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [result.skipped for result in results],
        "sizes": [result.num_samples for result in results],
        "averaged": averaged,
        "evaluated": evaluated.losses,
        "num_samples": evaluated.num_samples,
        "boundaries": list(pipeline.plan.boundaries),
        "stage_names": list(pipeline.plan.stage_names),
        "delays": [x.delay for x in stages],
        "trained": [x.trainable for x in stages],
        "measured_ops": sum(1 for _ in pipeline.measured().spans),
        "old_copies": old_copies,
        "held": [[*x.parameters] for x in pipeline._executor.runners.values()],
        "weights": weight_digests(pipeline),
        "num_copies": num_copies(state),
    }
    if case.get("num_shards", 1) > 1:
        pipeline.gather_into(model)  # the next case begins with it
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


def _averaged(pipeline: hocket.Pipeline, data: list[Any], stem: Path) -> float:
    """Evaluate with averaged weights; leave them, and what the weights are then."""
    _save(pipeline.state_dict(ema=True), pipeline.world, f"{stem}.ema")
    loss = pipeline.evaluate(data, use_ema=True).loss
    _save(pipeline.state_dict(), pipeline.world, f"{stem}.after")
    return loss


def _check_compiled(pipeline: hocket.Pipeline) -> None:
    """What was compiled ran, and not the stages as they are."""
    for runner in pipeline._executor.runners.values():
        function = runner.module.training_code.function
        assert isinstance(function, CompiledFunction)
        assert function.num_calls > 0


def _old_copies(pipeline: hocket.Pipeline) -> list[float]:
    """Bytes of old weights, over those of the weights, of each of these stages."""
    copies = []
    for runner in pipeline._executor.runners.values():
        own = sum(p.nbytes for p in runner.parameters.values())
        old = 0 if runner.versions is None else runner.versions.num_bytes
        copies.append(old / max(1, own))
    return copies


def weight_digests(pipeline: hocket.Pipeline) -> dict[str, int]:
    """Of this worker's own weights, by name: those of replicas have the same bits."""
    with pipeline._executor.whole_weights():
        return {
            name: zlib.crc32(_bytes(parameter.clone()))
            for runner in pipeline._executor.runners.values()
            for name, parameter in runner.module.named_parameters()
        }


def num_copies(state: Mapping[str, Tensor]) -> int:
    """Tensors of a state; a tied one counts once, whatever its names."""
    return len({tensor.data_ptr() for tensor in state.values()})


def _gradients(case: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The gradients of this worker's stages, by step and name."""
    per_step = len(GRADIENTS) // case["num_steps"] or 1
    for i, named in enumerate(GRADIENTS):
        yield from ((f"{i // per_step}/{name}", x) for name, x in named.items())


def _save(state: Mapping[str, Tensor], world: World, path: str) -> None:
    if world.rank == 0:
        save_file({name: t.clone().contiguous() for name, t in state.items()}, path)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
