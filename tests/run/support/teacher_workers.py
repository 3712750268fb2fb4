"""What the workers of the tests with teachers do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hocket
from hocket.core.simulate import long_step_s
from hocket.run.cluster.world import World
from hocket.run.stage.compiled.function import CompiledFunction
from hocket.run.tune import build
from tests.run.support.captured_once import Shelf, captured_once
from tests.run.support.joined import join
from tests.run.support.started import started
from tests.run.support.teacher_models import (
    LOSSES,
    adamw,
    largest_difference,
    make_batches,
    make_student,
    make_teacher,
    plain_loop,
    term_of,
    update_of,
    weighted,
)


def teachers_of(case: Mapping[str, Any], shelf: Shelf) -> dict[str, hocket.Teacher]:
    """Make the teachers of a case."""
    found = {}
    for name, facts in case["teachers"].items():
        update = update_of(facts["kind"])
        more = {key: x for key, x in facts.items() if key != "kind"}
        is_tied = case.get("is_tied", False)
        make = partial(make_teacher, facts["kind"], is_tied=is_tied)
        net = shelf.model(f"{name}, {facts['kind']}, {is_tied}", make)
        found[name] = hocket.Teacher(net, update=update, **more)
    return found


def make_pipeline(
    case: Mapping[str, Any], world: World, folder: Path, shelf: Shelf
) -> hocket.Pipeline:
    """Make the pipeline of a case."""
    num_frozen, is_tied = case.get("frozen_blocks", 0), case.get("is_tied", False)
    make = partial(make_student, num_frozen, is_tied=is_tied)
    keys = (
        "clip_norm",
        "accumulate",
        "stages_per_device",
        "cut",
        "recompute",
        "compile",
        "teacher_lane",
    )
    return started(
        shelf.model(f"student, {num_frozen}, {is_tied}", make),
        LOSSES[case.get("loss", "distil")],
        adamw,
        make_batches()[0],
        schedule=case["schedule"],
        num_microbatches=case.get("num_microbatches", 4),
        num_replicas=case.get("num_replicas", 1),
        num_shards=case.get("num_shards", 1),
        teachers=teachers_of(case, shelf),
        profile_dir=folder / "profiles",
        world=world,
        **{key: case[key] for key in keys if key in case},
    )


def train_all(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case in one job; rank 0 leaves the states in files."""
    world = join()
    with captured_once() as shelf:
        return [
            _train(world, case, Path(folder), i, shelf) for i, case in enumerate(cases)
        ]


def _train(
    world: World, case: dict[str, Any], folder: Path, number: int, shelf: Shelf
) -> dict[str, Any]:
    batches = make_batches()
    losses, evaluated = [], []
    with make_pipeline(case, world, folder, shelf) as pipeline:
        flags = _flags(pipeline)
        for result in pipeline.train(batches, drain_every=case.get("drain_every")):
            losses.append(result.losses)
            if case.get("interrupts"):
                evaluated.append(pipeline.evaluate(batches[-2:]).losses)
                pipeline.save(folder / f"run-{number}")
        evaluated.append(pipeline.evaluate(batches[-2:]).losses)
        state = pipeline.state_dict()
        if world.rank == 0:
            tensors = {name: x.clone().contiguous() for name, x in state.items()}
            save_file(tensors, folder / f"{number}.st")
        return {
            "losses": losses,
            "evaluated": evaluated[-1],
            "names": list(state),
            "flags_kept": flags == _flags(pipeline),
            "measured_ops": sum(1 for _ in pipeline.measured().spans),
            "predicted_s": pipeline.predicted.makespan_s,
            "order": str(pipeline.plan.schedule),
            "stage_names": pipeline.plan.stage_names,
            "compiled": _compiled(pipeline),
        }


def _compiled(pipeline: hocket.Pipeline) -> dict[str, bool]:
    """Say for this worker's stage of each net whether its compiled code ran."""
    codes = {
        runner.net: runner.module.code_in(training=runner.training).function
        for runner in pipeline._executor.runners.values()
    }
    return {
        net: isinstance(x, CompiledFunction) and x.num_calls > 0
        for net, x in codes.items()
    }


def resume_all(
    cases: list[dict[str, Any]], folder: str, steps: list[int]
) -> list[list[float]]:
    """Train, save after some steps, and go on from each save in another pipeline.

    Returns:
        For each case and step, the largest difference of a weight or buffer from those
        of the training that went on.
    """
    world = join()
    found = []
    with captured_once() as shelf:
        for i, case in enumerate(cases):
            place = Path(folder) / f"run-{i}"
            state = _saved(world, case, place, shelf, steps)
            found.append(
                [
                    largest_difference(_resumed(world, case, place, shelf, step), state)
                    for step in steps
                ]
            )
    return found


def resume_elsewhere(case: dict[str, Any], folder: str, step: int) -> float:
    """Go on from a save of another layout; compare with the plain loop."""
    world = join()
    with captured_once() as shelf:
        found = _resumed(world, case, Path(folder) / "run-0", shelf, step)
    return largest_difference(found, plain_loop(case)[0])


def _saved(
    world: World, case: dict[str, Any], place: Path, shelf: Shelf, steps: list[int]
) -> dict[str, Tensor]:
    with make_pipeline(case, world, place.parent, shelf) as pipeline:
        for result in pipeline.train(
            make_batches(), drain_every=lambda step: step + 1 in steps
        ):
            if result.step + 1 in steps:
                pipeline.save(place, keep=None)
        return pipeline.state_dict()


def _resumed(
    world: World, case: dict[str, Any], place: Path, shelf: Shelf, step: int
) -> dict[str, Tensor]:
    with make_pipeline(case, world, place.parent, shelf) as pipeline:
        pipeline.load(place, step=step)
        for _ in pipeline.train(make_batches()[step:]):
            pass
        return pipeline.state_dict()


def steps_of(schedules: list[str], folder: str) -> dict[str, float]:
    """Return the predicted seconds of a filled step, by the student's schedule.

    All are predicted from what the first start measured and kept. A dry run would
    find other seconds for each order.
    """
    world = join()
    found = {}
    with captured_once() as shelf, pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "dry_run", lambda costs, *_: costs)
        for name in schedules:
            case = {"schedule": name, "teachers": {"teacher": {"kind": "frozen"}}}
            with make_pipeline(case, world, Path(folder), shelf) as pipeline:
                plan = pipeline.plan
                found[name] = long_step_s(plan.schedule, plan.costs)
    return found


def influences(folder: str) -> list[float]:
    """Set the weight of one sample after the other to zero, in a step of plain SGD.

    Returns:
        For each sample, the largest difference between what the gradient of this
        worker's stages loses by it and the gradient of that sample's term alone.
    """
    world = join()
    x, y = make_batches(1)[0]
    ones = torch.ones(len(x), dtype=torch.float64)
    with started(
        make_student(),
        weighted,
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
        (x, (y, ones)),
        num_microbatches=4,
        teachers={"teacher": hocket.Teacher(make_teacher("frozen"))},
        world=world,
        profile_dir=Path(folder) / "profiles",
    ) as pipeline:
        runners = pipeline._executor.runners.values()
        held = {
            name: (parameter, parameter.detach().clone())
            for runner in runners
            if runner.net == "model"
            for name, parameter in runner.parameters.items()
        }

        def gradient(weights: Tensor) -> dict[str, Tensor]:
            pipeline.step((x, (y, weights)))
            found = {name: start - p.detach() for name, (p, start) in held.items()}
            for parameter, start in held.values():
                parameter.detach().copy_(start)
            return found

        whole = gradient(ones)
        off = []
        for sample in range(len(x)):
            less = gradient(ones.index_fill(0, torch.tensor([sample]), 0.0))
            lost = {name: whole[name] - less[name] for name in whole}
            term = term_of(x, y, sample)
            off.append(max(float((lost[n] - term[n]).abs().max()) for n in whole))
        return off


def _flags(pipeline: hocket.Pipeline) -> dict[str, bool]:
    return {
        f"{runner.net}.{name}": parameter.requires_grad
        for runner in pipeline._executor.runners.values()
        for name, parameter in runner.parameters.items()
    }
