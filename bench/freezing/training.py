"""One contestant's training on one worker: its time, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.models.make import make_model
from hocket.recipes.training.optimizer import make_optimizer
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import Task, make_task
from hocket.recipes.training.train import make_pipeline
from hocket.run.cluster.world import World
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import Samples
from hocket.run.nets.freezable import freezable_modules
from hocket.run.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Ran:
    """A training of ten epochs.

    Args:
        seconds: from the first batch to the end of the last step, transitions included.
        transitions_s: of each change of the layout.
        predicted_s: the steps, as simulated by the plan that was played at each.
        epochs: layout and frozen layers of each epoch.
        epochs_s: the seconds of each epoch.
        cache_hits: over all steps.
        loss: of the evaluation after the last step.
        accuracy: the same.
    """

    seconds: float
    transitions_s: list[float]
    predicted_s: float
    epochs: list[list[Any]]
    epochs_s: list[float]
    cache_hits: int
    loss: float
    accuracy: float


def ready(recipe_name: str, settings: Iterable[str]) -> tuple[Recipe, Task]:
    """Return a recipe with its data."""
    recipe = resolve(recipe_name, [*settings], allow_outside=True).recipe
    return recipe, make_task(recipe)


def train(
    recipe: Recipe, task: Task, evaluation: Samples, world: World, place: Path
) -> dict[str, Any]:
    """Train a recipe to its end, and evaluate; every worker must call this."""
    layout = StepLayout.of(recipe, task.training)
    with make_pipeline(
        task, layout, place, profile_dir=place / "profiles", world=world
    ) as pipeline:
        return _trained(pipeline, layout, task, evaluation, world)


def _trained(
    pipeline: Pipeline,
    layout: StepLayout,
    task: Task,
    evaluation: Samples,
    world: World,
) -> dict[str, Any]:
    steps: list[tuple[int, str, int, float]] = []
    transitions_s, predicted_s, hits = [], 0.0, 0
    world.barrier("the first step")
    begin_s = now_s = perf_counter()
    for result in pipeline.train(layout.loader()):
        before_s, now_s = now_s, perf_counter()
        shape = result.layout or layout.recipe.pipeline.layout or ""
        epoch = layout.epoch(result.step)
        steps.append((epoch, shape, result.num_frozen, now_s - before_s))
        predicted_s += pipeline.predicted.makespan_s
        hits += result.cache_hits
        if result.transition_s:
            transitions_s.append(round(result.transition_s, 4))
    seconds = max(world.gather_json(perf_counter() - begin_s, "seconds"))
    by_epoch = [[*group] for _, group in groupby(steps, key=lambda x: x[0])]
    found = pipeline.evaluate(EvaluationLoader(evaluation, 100), task.metrics)
    ran = Ran(
        round(seconds, 4),
        transitions_s,
        round(predicted_s, 4),
        [[group[-1][1], group[-1][2]] for group in by_epoch],
        [round(sum(x[3] for x in group), 4) for group in by_epoch],
        hits,
        round(found.loss, 4),
        round(found.metrics["accuracy"], 4),
    )
    return asdict(ran)


def most_bytes(
    recipe: Recipe, task: Task, world: World, place: Path
) -> tuple[int, int]:
    """Return what a device needs of a layout: predicted, and how many parameters."""
    layout = StepLayout.of(recipe, task.training)
    with make_pipeline(
        task, layout, place, profile_dir=place / "profiles", world=world
    ) as pipeline:
        return round(pipeline.predicted.most_bytes), pipeline.num_parameters[0]


def pretrain(recipe: Recipe, task: Task, world: World, folder: Path) -> Path:
    """Train as the recipe says, and return a folder with the weights.

    It stands in for the pretraining on other data that fine-tuning begins with.
    """
    layout = StepLayout.of(recipe, task.training)
    with make_pipeline(task, layout, folder, profile_dir=None, world=world) as pipeline:
        for _ in pipeline.train(layout.loader()):
            pass
        state = pipeline.state_dict()
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: x.clone().contiguous() for name, x in state.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
    world.barrier("the pretrained weights")
    return folder


def train_frozen_by_hand(
    recipe: Recipe,
    task: Task,
    frozen: Sequence[int],
    world: World,
    place: Path,
) -> dict[str, Any]:
    """Freeze layers, and leave the cut where it was: "freezing only".

    A pipeline that freezes layers cuts what is left again. So each epoch has a pipeline
    of its own here, cut in the middle, with weights that want no gradient; only steps
    are timed. Optimizers begin anew in each, so that there is no quality to compare.

    Args:
        recipe: of the base.
        task: its data.
        frozen: the layers that are frozen in each epoch.
        world: the job.
        place: a folder for profiles.
    """
    layout = StepLayout.of(recipe, task.training)
    batches = [*layout.loader()][: layout.steps_per_epoch]
    seconds: dict[int, float] = {}
    for num_frozen in dict.fromkeys(frozen):
        model = make_model(recipe, task.training)
        modules = freezable_modules(model, None)
        _freeze(model, modules[num_frozen:] if num_frozen else None)
        with Pipeline(
            model,
            task.loss,
            optimizer=make_optimizer(recipe.optimizer),
            example=batches[0],
            schedule=recipe.pipeline.schedule,
            num_microbatches=recipe.pipeline.num_microbatches,
            cut=[modules[len(modules) // 2]],
            profile_dir=place / "profiles",
            run_dir=place,
            world=world,
        ) as pipeline:
            pipeline.step(batches[0])
            world.barrier("the first step")
            begin_s = perf_counter()
            for _ in pipeline.train(batches):
                pass
            lasted_s = perf_counter() - begin_s
        seconds[num_frozen] = max(world.gather_json(lasted_s, "seconds"))
    epochs_s = [round(seconds[number], 4) for number in frozen]
    return {
        "seconds": round(sum(epochs_s), 4),
        "epochs": [["2x1", number] for number in frozen],
        "epochs_s": epochs_s,
    }


def _freeze(model: nn.Module, first_that_trains: Sequence[str] | None) -> None:
    """Let the layers before one want no gradient, with what comes before them."""
    if first_that_trains is None:
        return
    trains = False
    for name, parameter in model.named_parameters():
        first = first_that_trains[:1]
        trains = trains or any(name.startswith(f"{x}.") for x in first)
        parameter.requires_grad_(trains)


def use_one_thread() -> None:
    """Let each worker compute on one core."""
    torch.set_num_threads(1)
