"""One contestant's training on one worker: its time, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Final

import torch
from safetensors.torch import save_file

from bench.freezing.speed import Probe
from hocket.freeze.forecast import Pace, Stretch
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.task import Task, make_task
from hocket.recipes.training.train import make_pipeline
from hocket.run.cluster.world import World
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Known:
    """What is known before a run.

    Args:
        pace: what steps are predicted to take beside what is simulated.
        probe_s: the seconds of a probe when the pace was measured.
    """

    pace: Pace
    probe_s: float


_NOTHING: Final = Known(Pace(), 0.0)


@dataclass(frozen=True, slots=True)
class Ran:
    """A training of ten epochs.

    Args:
        seconds: from the first batch to the end of the last step, transitions included.
        transitions_s: of each change of the layout.
        predicted_s: the steps, as simulated by the plan that was played at each, at the
            pace that was known before.
        known_probe_s: the seconds of a probe when that was measured.
        probes_s: before the first epoch, and after each.
        epochs: layout and frozen layers of each epoch.
        epochs_s: the seconds of each epoch's steps, without transitions.
        epochs_predicted_s: their share of `predicted_s`.
        ends_s: at the end of each epoch, the seconds since the first batch, and those
            that hocket predicts for the rest; both with changes of the layout.
        cache_hits: over all steps.
        loss: of the evaluation after the last step.
        accuracy: the same.
    """

    seconds: float
    transitions_s: list[float]
    predicted_s: float
    known_probe_s: float
    probes_s: list[float]
    epochs: list[list[Any]]
    epochs_s: list[float]
    epochs_predicted_s: list[float]
    ends_s: list[list[float]]
    cache_hits: int
    loss: float
    accuracy: float


def ready(recipe_name: str, settings: Iterable[str]) -> tuple[Recipe, Task]:
    """Return a recipe with its data."""
    recipe = resolve(recipe_name, [*settings], allow_outside=True).recipe
    return recipe, make_task(recipe)


def train(
    recipe: Recipe,
    task: Task,
    evaluation: Samples,
    world: World,
    place: Path,
    known: Known = _NOTHING,
) -> dict[str, Any]:
    """Train a recipe to its end, and evaluate; every worker must call this.

    Args:
        recipe: the recipe.
        task: its data.
        evaluation: the samples to evaluate on.
        world: the job.
        place: a folder for profiles.
        known: what the run is predicted by.
    """
    with make_pipeline(
        task, place, profile_dir=place / "profiles", world=world
    ) as pipeline:
        return _trained(pipeline, task, evaluation, world, known)


def _trained(
    pipeline: Pipeline,
    task: Task,
    evaluation: Samples,
    world: World,
    known: Known,
) -> dict[str, Any]:
    steps: list[tuple[int, str, int, float, float]] = []
    transitions_s, ends_s, hits = [], [], 0
    probe = Probe(world)
    probes_s = [probe.seconds()]
    world.barrier("the first step")
    begin_s = now_s = perf_counter()
    for result in pipeline.train(task.loader()):
        before_s, now_s = now_s, perf_counter()
        lasted_s = now_s - before_s - result.transition_s
        predicted_s = known.pace.step_s(_stretch(pipeline, result))
        if result.transition_s or not result.step:
            predicted_s += known.pace.first_s
        epoch = task.epoch(result.step)
        steps.append((epoch, result.layout, result.num_frozen, lasted_s, predicted_s))
        hits += result.cache_hits
        if (result.step + 1) % task.batches_per_epoch == 0:
            left_s = pipeline.seconds_left(task.num_steps) or 0.0
            ends_s.append([round(now_s - begin_s, 4), round(left_s, 4)])
            probes_s.append(probe.seconds())
            asked_s = perf_counter() - now_s
            now_s, begin_s = now_s + asked_s, begin_s + asked_s
        if result.transition_s:
            transitions_s.append(round(result.transition_s, 4))
    seconds = max(world.gather_json(perf_counter() - begin_s, "seconds"))
    by_epoch = [[*group] for _, group in groupby(steps, key=lambda x: x[0])]
    found = pipeline.evaluate(EvaluationLoader(evaluation, 100), task.metrics)
    ran = Ran(
        round(seconds, 4),
        transitions_s,
        round(sum(x[4] for x in steps), 4),
        round(known.probe_s, 6),
        [round(x, 6) for x in probes_s],
        [[group[-1][1], group[-1][2]] for group in by_epoch],
        [round(sum(x[3] for x in group), 4) for group in by_epoch],
        [round(sum(x[4] for x in group), 4) for group in by_epoch],
        ends_s,
        hits,
        round(found.loss, 4),
        round(found.metrics["accuracy"], 4),
    )
    return asdict(ran)


@dataclass(frozen=True, slots=True)
class Base:
    """What is known of a layout without freezing.

    Args:
        bytes: what a device needs, as predicted.
        num_parameters: of the model.
        probe_s: the seconds of a probe when its costs were measured.
    """

    bytes: int
    num_parameters: int
    probe_s: float


def base(recipe: Recipe, task: Task, world: World, place: Path) -> Base:
    """Make a pipeline, which measures the model, and return what it predicts.

    Args:
        recipe: without freezing.
        task: its data.
        world: the job.
        place: a folder for profiles.
    """
    probe = Probe(world)
    before_s = probe.seconds()
    with make_pipeline(
        task, place, profile_dir=place / "profiles", world=world
    ) as pipeline:
        most_bytes = round(pipeline.plan.predicted.most_bytes)
        probe_s = (before_s + probe.seconds()) / 2
        return Base(most_bytes, pipeline.num_parameters[0], probe_s)


def _stretch(pipeline: Pipeline, result: StepResult) -> Stretch:
    """Return what was simulated of a step that has just ended."""
    num_replicas = int(result.layout.partition("x")[2])
    return Stretch(result.step, num_replicas, pipeline.predicted.makespan_s)


def pretrain(
    recipe: Recipe, task: Task, world: World, folder: Path
) -> tuple[Path, Known]:
    """Train as the recipe says; every worker must call this.

    It stands in for the pretraining on other data that fine-tuning begins with.

    Returns:
        A folder with the weights; and the pace of the steps: what they took longer than
        simulated, and outside of their order (reading and cutting up the batch).
    """
    probe, probes_s = Probe(world), list[float]()
    with make_pipeline(
        task, folder, profile_dir=folder.parent / "profiles", world=world
    ) as pipeline:
        measured_s, beside_s, now_s = [], [], perf_counter()
        for result in pipeline.train(task.loader()):
            before_s, now_s = now_s, perf_counter()
            measured_s.append(result.seconds)
            beside_s.append(now_s - before_s - result.seconds)
            if (result.step + 1) % task.batches_per_epoch == 0:
                probes_s.append(probe.seconds())
                now_s = perf_counter()
        pace = Pace.of(measured_s, beside_s, _stretch(pipeline, result))
        state = pipeline.state_dict()
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: x.clone().contiguous() for name, x in state.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
    world.barrier("the pretrained weights")
    return folder, Known(pace, fmean(probes_s))


def use_one_thread() -> None:
    """Let each worker compute on one core."""
    torch.set_num_threads(1)
