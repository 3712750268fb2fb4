"""Train a recipe: what runs in every worker, from the data to the report.

    worker 0   task, pipeline, step, step, ... evaluation, checkpoint, step, ... report
    worker 1   task, pipeline, step, step, ... evaluation, checkpoint, step, ...

Both see the same batches in the same order; worker 0 alone reports and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter
from rich.console import Console

from hocket.core.layout import WorkerLayout
from hocket.errors import ConfigError
from hocket.freeze import Alpha, ArgminGradient, Listed, Percentile, Plasticity
from hocket.freeze.settings import Cache
from hocket.model.profile.profile import path_of
from hocket.options import ScheduleOptions, UpdateOptions
from hocket.planner.rank import PlanConfig, Progress, Search
from hocket.planner.ranking.report import Ranking, Shown
from hocket.planner.ranking.table import Paper
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import Resolved, resolved_in
from hocket.recipes.config.settings import (
    AnyFreezing,
    CacheSettings,
    FreezeSettings,
    PlasticitySettings,
)
from hocket.recipes.run_files import CACHE_NAME
from hocket.recipes.training.loop import Loop
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.records import EvaluationRecord, Watcher, refuse_failures
from hocket.recipes.training.report import write_report
from hocket.recipes.training.run_folder import NEWEST, enter_folder, resume_point
from hocket.recipes.training.task import Task, make_task
from hocket.recipes.training.watchers import RunProgress, plan_line, print_plain
from hocket.run.checkpoint.format.folder import pointer
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.startup import StartupProgress
from hocket.run.elastic.cache.training_order import refuse_random
from hocket.run.pipeline import Pipeline
from hocket.run.tune.planning import plan
from hocket.signatures import values_of

POLICIES: Final[Mapping[str, type[Any]]] = {
    "alpha": Alpha,
    "argmin-gradient": ArgminGradient,
    "percentile": Percentile,
    "plasticity": Plasticity,
    "listed": Listed,
}
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
    evaluation = train_recipe(resolved_in(run_dir).recipe, Path(run_dir))
    return {"loss": evaluation.loss, **evaluation.metrics}


def profile(run_dir: str, is_again: bool) -> dict[str, Any]:
    """Profile, cut and predict the recipe that a folder holds; each worker's entry.

    Workers share caches and memory, so that a layer measured alone is faster than one
    measured beside the others. `hocket train` uses the saved profile.

    Args:
        run_dir: the folder, with its `recipe.toml`.
        is_again: measure even if there is a saved profile, and replace it.

    Returns:
        As JSON: the profile, its path if it is kept, whether it was there before, the
        number of each stage's first layer, and the predicted step.
    """
    recipe = resolved_in(run_dir).recipe
    task = make_task(recipe)
    folder = Path(recipe.run.profile_folder)
    kept = {path.name for path in folder.glob("*.json")}
    profile_dir = None if is_again else folder
    with make_pipeline(task, Path(run_dir), profile_dir=profile_dir) as pipeline:
        plan = pipeline.plan
        conditions = plan.profile.conditions
        is_kept = bool(conditions["code"]) and not plan.profile.noise
        path = path_of(folder, conditions) if is_kept else None
        if is_again and pipeline.is_main and path is not None:
            plan.profile.save(path)
        predicted = plan.predicted
        return {
            "recipe": recipe.run.name,
            "profile": plan.profile.to_json(),
            "path": path and str(path),
            "was_kept": path is not None and path.name in kept and not is_again,
            "stages": [0, *plan.boundaries],
            "step_s": predicted.step_s,
            "bubble_fraction": predicted.bubble_fraction,
        }


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
    profile_dir = Path(recipe.run.profile_folder)
    with ExitStack() as stack:
        pipeline = stack.enter_context(
            make_pipeline(task, run_dir, profile_dir=profile_dir, world=world)
        )
        console = Console(file=sys.stdout, quiet=not pipeline.is_main)
        print_plain(console, plan_line(pipeline.plan, recipe))
        loop = Loop(task, pipeline, run_dir)
        _go_on(loop, pipeline, console)
        if pipeline.is_main:
            stack.callback(loop.watchers.close)
            # It may find what it has written itself, before it broke off.
            resumes = recipe.checkpoint.resume == NEWEST
            loop.watch(goes_on=resumes or pipeline.world.attempt > 0)
            progress = RunProgress(
                task.num_steps,
                recipe.training.num_epochs,
                console,
                first_step=loop.totals.num_steps,
                seconds_left=pipeline.seconds_left,
            )
            for watcher in (progress, *watchers):
                loop.watchers.append(watcher)
        with ExitStack() as signals:
            with suppress(ConfigError):  # a handler of the user's own stays
                save = partial(_save_to_go_on, loop, console)
                signals.enter_context(pipeline.on_sigterm(save))
            summary = loop.run()
        if recipe.checkpoint.final and (last := pointer(loop.checkpoints_dir)):
            print_plain(console, f"weights: {loop.checkpoints_dir / last.name}")
        if pipeline.is_main:
            with loop.watchers.guard(f"the report in {run_dir}"):
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
        return None if start is None else [str(start[0]), start[1]]

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


def _save_to_go_on(loop: Loop, console: Console) -> None:
    """Save after a SIGTERM, and say what, and how to go on."""
    loop.save(is_last=True)
    print_plain(
        console,
        f"SIGTERM: saved after step {loop.totals.num_steps} in {loop.checkpoints_dir}; "
        f"the same command with --run-dir {loop.run_dir} --resume auto goes on",
    )


def make_pipeline(
    task: Task, run_dir: Path, *, profile_dir: Path | None, world: World | None = None
) -> Pipeline:
    """The recipe's pipeline, over the workers that there are.

    Args:
        task: what to train.
        run_dir: where the reports of failures go, and a cache without a folder.
        profile_dir: the folder of saved profiles; None always measures.
        world: the job, where it is joined already.

    Raises:
        DataError: the recipe has a section [cache], and samples vary.
    """
    recipe = task.recipe
    pipeline, training = recipe.pipeline, recipe.training
    options = {
        **values_of(ScheduleOptions, pipeline),
        **values_of(UpdateOptions, training),
        **freezing_options(recipe.freeze, recipe.cache, task.steps_in(), run_dir),
    }
    loader = task.loader()
    if (cache := options.get("cache")) is not None:  # before the model is captured
        refuse_random(loader, cache, _DRAW_ONCE)
    return Pipeline(
        task.make_model(),  # the only reference: only our stages stay in memory
        task.loss,
        optimizer=make_optimizer(recipe.optimizer),
        example=loader.example(),
        profile_dir=profile_dir,
        scheduler=make_scheduler(task.learning_rate_share),
        seed=training.seed,
        run_dir=run_dir,
        teachers=task.make_teachers(),
        world=world,
        progress=_print_start,
        **options,
    )


def freezing_options(
    freezing: AnyFreezing | None,
    cache: CacheSettings | None,
    steps_per_epoch: int,
    run_dir: Path,
) -> dict[str, Any]:
    """Return the arguments of `hocket.Pipeline` that say what freezes; none if nothing.

    Args:
        freezing: the recipe's section [freeze].
        cache: the recipe's section [cache].
        steps_per_epoch: the steps between decisions where the recipe does not say.
        run_dir: the run's folder, for a cache without one.
    """
    if not isinstance(freezing, FreezeSettings):
        return {}
    kind = POLICIES[freezing.policy]
    given = values_of(kind, freezing)
    given["every_steps"] = freezing.every_steps or steps_per_epoch
    if isinstance(freezing, PlasticitySettings):
        given["unfreeze_at"] = freezing.unfreeze_at or None
    shapes: dict[int, tuple[int, int]] | None = None
    if freezing.shapes is not None:
        layouts = {n: WorkerLayout.parse(x) for n, x in freezing.shapes.items()}
        shapes = {n: (x.num_devices, x.num_replicas) for n, x in layouts.items()}
    kept = None
    if cache is not None:
        folder = cache.folder or run_dir / CACHE_NAME
        kept = Cache(**values_of(Cache, cache) | {"folder": Path(folder)})
    return {
        "freeze": kind(**given),
        "shapes": shapes,
        "balance": freezing.balance,
        "recut": freezing.recut,
        "cache": kept,
    }


def _print_start(progress: StartupProgress) -> None:
    """Print what the start of the pipeline does, if output goes to a terminal."""
    if sys.stdout.isatty():
        print_plain(Console(file=sys.stdout), str(progress))


# Plan a recipe: in this process, or measured by as many workers as it would have.
def planned(
    run_dir: str, request: dict[str, Any], paper: dict[str, Any]
) -> dict[str, Any]:
    """Plan the recipe that a folder holds; each worker's entry.

    Args:
        run_dir: the folder, with its `recipe.toml`.
        request: a `PlanConfig`, as JSON.
        paper: a `Paper`.

    Returns:
        On rank 0 a `Shown`, else nothing.
    """
    resolved = resolved_in(run_dir)
    with closing(join_world()) as world:
        config = TypeAdapter(PlanConfig).validate_python(request)
        ranking = plan_recipe(resolved, config, world)
        return {} if world.rank else asdict(Shown.of(ranking, Paper(**paper)))


def plan_recipe(
    resolved: Resolved,
    config: PlanConfig,
    world: World | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Predict every way to train a recipe.

    Args:
        resolved: the recipe.
        config: what to plan for; batch size and precision are the recipe's when not
            given.
        world: the job, where all its workers measure.
        progress: called with the number of candidates done, and of all.

    Raises:
        DataError: its data are missing or too few.
        PlanError: a name that is not known, or numbers that nothing fits.
    """
    recipe = resolved.recipe
    search, training = config.search or Search(), recipe.training
    # It says the type of the weights, too.
    update = {"precision": config.precision or training.precision}
    training = training.model_copy(update=update)
    recipe = recipe.model_copy(update={"training": training})
    task = make_task(recipe)
    config = replace(
        config,
        batch_size=config.batch_size or training.batch_size,
        precision=training.precision,
        search=replace(search, clips=training.clip_norm is not None),
    )
    return plan(
        task.make_model(),
        next(iter(task.loader())),
        task.loss,
        optimizer=make_optimizer(recipe.optimizer),
        teachers=task.make_teachers(),
        world=world,
        progress=progress,
        **values_of(PlanConfig, config),
    )
