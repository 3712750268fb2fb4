"""One contestant's training on one worker: its time, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from hocket.core.simulate import simulate
from hocket.planner.stages import stage_costs
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import Task, make_task
from hocket.recipes.training.train import make_pipeline
from hocket.run.cluster.world import World
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples
from hocket.run.engine.plan import Plan
from hocket.run.nets.freezable import freezable_modules
from hocket.run.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Ran:
    """A training of ten epochs.

    Args:
        seconds: from the first batch to the end of the last step, transitions included.
        transitions_s: of each change of the layout.
        predicted_s: the steps, as simulated by the plan that was played at each, with
            what a step takes beside its ops.
        epochs: layout and frozen layers of each epoch.
        epochs_s: the seconds of each epoch's steps, without transitions.
        epochs_predicted_s: their share of `predicted_s`.
        cache_hits: over all steps.
        loss: of the evaluation after the last step.
        accuracy: the same.
    """

    seconds: float
    transitions_s: list[float]
    predicted_s: float
    epochs: list[list[Any]]
    epochs_s: list[float]
    epochs_predicted_s: list[float]
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
    beside_s: float = 0.0,
) -> dict[str, Any]:
    """Train a recipe to its end, and evaluate; every worker must call this.

    Args:
        recipe: the recipe.
        task: its data.
        evaluation: the samples to evaluate on.
        world: the job.
        place: a folder for profiles.
        beside_s: what a step is predicted to take beside its ops: see `pretrain`.
    """
    layout = StepLayout.of(recipe, task.training)
    with make_pipeline(
        task, layout, place, profile_dir=place / "profiles", world=world
    ) as pipeline:
        return _trained(pipeline, layout, task, evaluation, world, beside_s)


def _trained(
    pipeline: Pipeline,
    layout: StepLayout,
    task: Task,
    evaluation: Samples,
    world: World,
    beside_s: float,
) -> dict[str, Any]:
    steps: list[tuple[int, str, int, float, float]] = []
    transitions_s, hits = [], 0
    world.barrier("the first step")
    begin_s = now_s = perf_counter()
    for result in pipeline.train(layout.loader()):
        before_s, now_s = now_s, perf_counter()
        lasted_s = now_s - before_s - result.transition_s
        predicted_s = pipeline.predicted.makespan_s + beside_s
        epoch = layout.epoch(result.step)
        steps.append((epoch, result.layout, result.num_frozen, lasted_s, predicted_s))
        hits += result.cache_hits
        if result.transition_s:
            transitions_s.append(round(result.transition_s, 4))
    seconds = max(world.gather_json(perf_counter() - begin_s, "seconds"))
    by_epoch = [[*group] for _, group in groupby(steps, key=lambda x: x[0])]
    found = pipeline.evaluate(EvaluationLoader(evaluation, 100), task.metrics)
    ran = Ran(
        round(seconds, 4),
        transitions_s,
        round(sum(x[4] for x in steps), 4),
        [[group[-1][1], group[-1][2]] for group in by_epoch],
        [round(sum(x[3] for x in group), 4) for group in by_epoch],
        [round(sum(x[4] for x in group), 4) for group in by_epoch],
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
        freezing_only: how many times as fast ten epochs are, simulated, if layers
            freeze, and the cut stays where it is.
    """

    bytes: int
    num_parameters: int
    freezing_only: float


def base(
    recipe: Recipe, task: Task, frozen: Sequence[int], world: World, place: Path
) -> Base:
    """Make a pipeline, which measures the model, and return what it predicts.

    Args:
        recipe: without freezing.
        task: its data.
        frozen: the layers that freezing alone freezes in each epoch.
        world: the job.
        place: a folder for profiles.
    """
    layout = StepLayout.of(recipe, task.training)
    modules = freezable_modules(task.make_model(), None)
    with make_pipeline(
        task, layout, place, profile_dir=place / "profiles", world=world
    ) as pipeline:
        plan, active = pipeline.plan, pipeline.num_parameters[0]
        whole_s = _step_s(plan, None)
        epochs = [_step_s(plan, modules[x] if x else None) for x in frozen]
        ratio = whole_s * len(frozen) / sum(epochs)
        return Base(round(plan.predicted.most_bytes), active, round(ratio, 4))


def _step_s(plan: Plan, first_that_trains: str | None) -> float:
    """Simulate a step in which the layers before one have no backward."""
    layers = [layer.cost(()) for layer in plan.profile.layers]
    names = [layer.name for layer in plan.profile.layers]
    first = 0
    if first_that_trains is not None:
        inside = first_that_trains, f"{first_that_trains}."
        first = next(
            i for i, x in enumerate(names) if x == inside[0] or x.startswith(inside[1])
        )
    frozen = [replace(x, input_grad_s=0.0, weight_grad_s=0.0) for x in layers[:first]]
    stages = stage_costs(
        [*frozen, *layers[first:]],
        plan.boundaries,
        recomputes=False,
        update_s_per_byte=0.0,
    )
    return simulate(plan.schedule, replace(plan.costs, stages=stages)).makespan_s


def pretrain(
    recipe: Recipe, task: Task, world: World, folder: Path
) -> tuple[Path, float]:
    """Train as the recipe says; every worker must call this.

    It stands in for the pretraining on other data that fine-tuning begins with.

    Returns:
        A folder with the weights; and the seconds of a step beside its ops, the median
        over epochs: reading and cutting up the batch, losses, norms.
    """
    layout = StepLayout.of(recipe, task.training)
    with make_pipeline(
        task, layout, folder, profile_dir=folder.parent / "profiles", world=world
    ) as pipeline:
        beside_s, now_s = [], perf_counter()
        for result in pipeline.train(layout.loader()):
            before_s, now_s = now_s, perf_counter()
            if (result.step + 1) % layout.batches_per_epoch == 0:
                beside_s.append(now_s - before_s - pipeline.measured().makespan_s)
                now_s = perf_counter()
        state = pipeline.state_dict()
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: x.clone().contiguous() for name, x in state.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
    world.barrier("the pretrained weights")
    return folder, median(beside_s)


def use_one_thread() -> None:
    """Let each worker compute on one core."""
    torch.set_num_threads(1)
