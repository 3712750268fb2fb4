"""Train a recipe: what runs in every worker, from the data to the report.

    worker 0   task, pipeline, step, step, ... evaluation, step, ... report
    worker 1   task, pipeline, step, step, ... evaluation, step, ...

Both see the same batches in the same order; worker 0 alone writes and prints.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console

from hocket.errors import RecipeError
from hocket.recipes.course import Course
from hocket.recipes.gpt import Gpt
from hocket.recipes.history import History
from hocket.recipes.loop import Loop
from hocket.recipes.metrics_log import MetricsLog
from hocket.recipes.optimizer import make_optimizer, make_scheduler
from hocket.recipes.progress import make_progress, plan_line, tell
from hocket.recipes.recipe import GptSettings, Recipe
from hocket.recipes.records import EvaluationRecord, Watcher
from hocket.recipes.report import write_report
from hocket.recipes.resolve import Resolved, resolve
from hocket.recipes.run_folder import (
    RECIPE_NAME,
    SAMPLE_NAME,
    make_folder,
)
from hocket.recipes.task import Task, make_task, sample_text
from hocket.run.pipeline import Pipeline
from hocket.run.world import World, join_world


def main(run_dir: str) -> dict[str, float]:
    """Train the recipe that a run's folder holds; the entry of each worker.

    Args:
        run_dir: the folder, with its `recipe.toml`.

    Returns:
        The last evaluation's loss and metrics.
    """
    recipe = resolve(str(Path(run_dir) / RECIPE_NAME)).recipe
    evaluation = train_recipe(recipe, Path(run_dir))
    return {"loss": evaluation.loss, **evaluation.metrics}


def train_in_job(resolved: Resolved, run_dir: Path | None) -> EvaluationRecord:
    """Train as one of the workers that torchrun has started; rank 0 makes the folder.

    Args:
        resolved: the same recipe on every worker.
        run_dir: an empty or new folder; one with the time in its name if not given.

    Returns:
        The last evaluation, the same on every worker.

    Raises:
        RecipeError: the folder cannot be used; every worker raises it.
        HocketError: as `train_recipe`.
    """
    with closing(join_world(timeout_s=resolved.recipe.pipeline.timeout_s)) as world:
        told: dict[str, str] = {}
        if world.rank == 0:
            try:
                told = {"folder": str(make_folder(resolved, run_dir))}
            except RecipeError as error:
                told = {"refused": str(error)}
        told = world.exchange.broadcast("folder of the run", told)
        if "refused" in told:
            raise RecipeError(told["refused"])
        return train_recipe(resolved.recipe, Path(told["folder"]), world)


def train_recipe(
    recipe: Recipe, run_dir: Path, world: World | None = None
) -> EvaluationRecord:
    """Train as the recipe says, and leave the run's files in its folder.

    Args:
        recipe: the same on every worker.
        run_dir: the run's own folder, with the recipe in it.
        world: the job, where it is joined already.

    Returns:
        The last evaluation, the same on every worker.

    Raises:
        DataError: the data are missing or too few.
        RecipeError: a package that the recipe needs is not installed.
        RunError: something went wrong while training.
    """
    task = make_task(recipe)
    course = Course.of(recipe, task.training)
    with ExitStack() as stack:
        pipeline = stack.enter_context(
            make_pipeline(
                task,
                course,
                run_dir,
                profile_dir=Path(recipe.run.profile_folder),
                world=world,
            )
        )
        console = Console(file=sys.stdout, quiet=not pipeline.is_main)
        history = History()
        watchers: list[Watcher] = []
        if pipeline.is_main:
            watchers = [
                history,
                MetricsLog(run_dir, recipe.run.log_every_steps),
                make_progress(course.num_steps, recipe.training.num_epochs, console),
            ]
        for watcher in watchers:
            stack.callback(watcher.close)
        tell(console, plan_line(pipeline.plan, recipe))
        loop = Loop(task, course, pipeline, watchers)
        summary = loop.run()
        if pipeline.is_main:
            path = write_report(run_dir, pipeline.plan, loop.typical, history, summary)
            tell(console, f"report: {path}")
        _write_sample(recipe, task, pipeline, run_dir, console)
    return summary.evaluation


def make_pipeline(
    task: Task,
    course: Course,
    run_dir: Path,
    *,
    profile_dir: Path | None,
    world: World | None = None,
) -> Pipeline:
    """The recipe's pipeline, over the workers that there are.

    Args:
        task: with the model to train.
        course: with the recipe and the first batch.
        run_dir: where the reports of failures go.
        profile_dir: where profiles are kept and found; None measures anew.
        world: the job, where it is joined already.
    """
    recipe, settings = course.recipe, course.recipe.pipeline
    return Pipeline(
        task.model,
        task.loss,
        optimizer=make_optimizer(recipe.optimizer),
        example=next(course.batches()),
        schedule=settings.schedule,
        num_microbatches=settings.num_microbatches,
        num_replicas=settings.num_replicas,
        stages_per_device=settings.stages_per_device,
        cut=settings.cut,
        profile_dir=profile_dir,
        scheduler=make_scheduler(course.learning_rate_share),
        seed=recipe.training.seed,
        timeout_s=settings.timeout_s,
        run_dir=run_dir,
        world=world,
    )


def _write_sample(
    recipe: Recipe, task: Task, pipeline: Pipeline, run_dir: Path, console: Console
) -> None:
    """Of a model of text, what it writes; every worker lends its stages' weights."""
    if not isinstance(recipe.model, GptSettings) or not recipe.model.sample_bytes:
        return
    state = pipeline.state_dict()
    if pipeline.is_main and isinstance(task.model, Gpt):
        task.model.load_state_dict(state)
        text = sample_text(task.model, recipe.model.sample_bytes, recipe.training.seed)
        (run_dir / SAMPLE_NAME).write_text(text, encoding="utf-8")
        tell(console, f"a sample:\n{text}")
