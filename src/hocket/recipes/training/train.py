"""Train a recipe: what runs in every worker, from the data to the report.

    worker 0   task, pipeline, step, step, ... evaluation, checkpoint, step, ... report
    worker 1   task, pipeline, step, step, ... evaluation, checkpoint, step, ...

Both see the same batches in the same order; worker 0 alone reports and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from hocket.options import ScheduleOptions, UpdateOptions
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import Resolved, resolve
from hocket.recipes.models.freezing import freezing_options
from hocket.recipes.run_files import RECIPE_NAME
from hocket.recipes.training.loop import Loop
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.progress import RunProgress, plan_line, print_plain
from hocket.recipes.training.records import EvaluationRecord, Watcher, refuse_failures
from hocket.recipes.training.report import write_report
from hocket.recipes.training.run_folder import enter_folder
from hocket.recipes.training.saving import NEWEST, resume_point
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import Task, make_task
from hocket.run.checkpoint.format.folder import pointer
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.startup import StartupProgress
from hocket.run.elastic.cache.cache_refusals import refuse_random
from hocket.run.pipeline import Pipeline
from hocket.signatures import values_of

_DRAW_ONCE: Final = (
    "--set cache.draws_once=true draws them once for each sample; or leave out the "
    "section [cache]"
)


def main(run_dir: str) -> dict[str, float]:
    """Train the recipe that a run's folder holds; the entry of each worker.

    Args:
        run_dir: the folder, with its `recipe.toml`.

    Returns:
        The last evaluation's loss and metrics.
    """
    recipe = resolve(str(Path(run_dir) / RECIPE_NAME), allow_outside=True).recipe
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
    with (
        closing(join_world(timeout_s=resolved.recipe.pipeline.timeout_s)) as world,
        ExitStack() as stack,
    ):

        def enter() -> str:
            is_restart = world.attempt > 0
            folder, lock = enter_folder(resolved, run_dir, is_restart=is_restart)
            stack.callback(lock.release)
            return str(folder)

        folder = decide_on_rank_0(world, enter, "folder of the run")
        return train_recipe(resolved.recipe, Path(folder), world=world)


def train_recipe(
    recipe: Recipe,
    run_dir: Path,
    *,
    watchers: Sequence[Watcher] = (),
    world: World | None = None,
) -> EvaluationRecord:
    """Train as the recipe says, and leave the run's files in its folder.

    Args:
        recipe: the same on every worker.
        run_dir: the run's own folder, with the recipe in it.
        watchers: who else hears of all steps and evaluations, on the main worker.
        world: the job, where it is joined already.

    Returns:
        The last evaluation, the same on every worker.

    Raises:
        DataError: the data are missing or too few.
        RecipeError: a function of the user's cannot be had.
        MissingPackageError: a package that the recipe needs is not installed.
        CheckpointError: a checkpoint is missing, damaged, or cannot be written.
        RunError: something went wrong while training.
        CallbackError: a watcher or the report failed; training has ended well.
    """
    task = make_task(recipe)
    layout = StepLayout.of(recipe, task.training)
    profile_dir = Path(recipe.run.profile_folder)
    with ExitStack() as stack:
        pipeline = stack.enter_context(
            make_pipeline(task, layout, run_dir, profile_dir=profile_dir, world=world)
        )
        console = Console(file=sys.stdout, quiet=not pipeline.is_main)
        print_plain(console, plan_line(pipeline.plan, recipe))
        loop = Loop(task, layout, pipeline, run_dir)
        _go_on(loop, pipeline, console)
        if pipeline.is_main:
            stack.callback(loop.watchers.close)
            # It may find what it has written itself, before it broke off.
            resumes = recipe.checkpoint.resume == NEWEST
            loop.watch(goes_on=resumes or pipeline.world.attempt > 0)
            progress = RunProgress(
                layout.num_steps,
                recipe.training.num_epochs,
                console,
                first_step=loop.totals.num_steps,
                seconds_left=pipeline.seconds_left,
            )
            for watcher in (progress, *watchers):
                loop.watchers.append(watcher)
        summary = loop.run()
        if recipe.checkpoint.final and (last := pointer(loop.checkpoints_dir)):
            print_plain(console, f"weights: {loop.checkpoints_dir / last.name}")
        if pipeline.is_main:
            with loop.watchers.guard("the report"):
                path = write_report(run_dir, pipeline.plan, loop.typical, summary)
                print_plain(console, f"report: {path}")
        by_rank = pipeline.world.gather_json(
            loop.watchers.failures, "failures of callbacks"
        )
        refuse_failures(
            [f"rank {rank}: {x}" for rank, own in enumerate(by_rank) for x in own]
        )
    return summary.evaluation


def _go_on(loop: Loop, pipeline: Pipeline, console: Console) -> None:
    """Load the checkpoint that the run goes on from, if any, and say which."""
    settings, run_dir = loop.recipe.checkpoint, loop.run_dir

    def find() -> Any:
        # Torchrun's own count differs between hosts.
        is_restart = pipeline.world.attempt > 0
        start = resume_point(run_dir, settings, is_restart=is_restart)
        return None if start is None else [str(start.folder), start.step]

    found = decide_on_rank_0(pipeline.world, find, "checkpoint to begin with")
    if found is None:
        if settings.resume == NEWEST:
            line = f"no checkpoint in {run_dir} yet: training begins at step 0"
            print_plain(console, line)
        return
    folder, step = found
    data = pipeline.load(folder, step=step, allow_previous=settings.allow_previous)
    loop.load_state_dict(data)
    num_steps = loop.totals.num_steps
    print_plain(console, f"goes on from {folder} after step {num_steps}")


def make_pipeline(
    task: Task,
    layout: StepLayout,
    run_dir: Path,
    *,
    profile_dir: Path | None,
    world: World | None = None,
) -> Pipeline:
    """The recipe's pipeline, over the workers that there are.

    Args:
        task: the model to train, and its loss.
        layout: the recipe and the first batch.
        run_dir: where the reports of failures go, and a cache without a folder.
        profile_dir: the folder of saved profiles; None always measures.
        world: the job, where it is joined already.

    Raises:
        DataError: the recipe has a section [cache], and samples vary.
    """
    recipe = layout.recipe
    pipeline, training = recipe.pipeline, recipe.training
    options = {
        **values_of(ScheduleOptions, pipeline),
        **values_of(UpdateOptions, training),
        **freezing_options(
            recipe.freeze, recipe.cache, layout.steps_per_epoch, run_dir
        ),
    }
    loader = layout.loader()
    if (cache := options.get("cache")) is not None:  # before the model is captured
        refuse_random(loader, cache, _DRAW_ONCE)
    return Pipeline(
        task.make_model(),  # the only reference: only our stages stay in memory
        task.loss,
        optimizer=make_optimizer(recipe.optimizer),
        example=loader.example(),
        profile_dir=profile_dir,
        scheduler=make_scheduler(layout.learning_rate_share),
        seed=training.seed,
        run_dir=run_dir,
        teachers=task.make_teachers(layout.num_steps),
        world=world,
        progress=_print_start,
        **options,
    )


def _print_start(progress: StartupProgress) -> None:
    """Print what the start of the pipeline does, if output goes to a terminal."""
    if sys.stdout.isatty():
        print_plain(Console(file=sys.stdout), str(progress))
