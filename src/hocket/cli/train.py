"""`hocket train`: a recipe, trained on workers of this machine or inside torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hocket import env

if TYPE_CHECKING:
    from hocket.recipes.resolve import Resolved

ENTRY: Final = "hocket.recipes.train:main"

RecipeArgument = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A built-in recipe, or a TOML file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the recipe."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(help="The same as --set pipeline.num_workers=N.", metavar="N"),
]


def train_command(
    recipe: RecipeArgument,
    settings: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="An empty or new folder for this run.")
    ] = None,
    workers: WorkersOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and stop.")
    ] = False,
) -> None:
    """Train a recipe on local workers, or as one of torchrun's.

    Leaves a folder with the recipe as resolved, metrics as JSON lines and for
    TensorBoard, and report.html with the predicted and the measured timeline.
    """
    settings = [*(settings or []), *num_workers_settings(workers)]
    resolved = read_recipe(recipe, settings)
    if dry_run:
        show(resolved)
    elif env.RANK.is_set:
        from hocket.recipes.train import train_in_job

        train_in_job(resolved, run_dir)
    else:
        start_workers(resolved, run_dir)


def read_recipe(recipe: str, settings: list[str]) -> Resolved:
    """The recipe with the settings laid over it.

    Raises:
        RecipeError: it is not valid.
    """
    from hocket.recipes.resolve import resolve

    return resolve(recipe, settings)


def num_workers_settings(workers: int | None) -> list[str]:
    """What `--workers` and torchrun's number of workers set in the recipe."""
    if env.RANK.is_set:
        workers = env.WORLD_SIZE.integer()
    return [] if workers is None else [f"pipeline.num_workers={workers}"]


def start_workers(resolved: Resolved, run_dir: Path | None) -> None:
    """Make the run's folder, start the workers, and wait for them.

    Raises:
        DataError: the user's data are missing or too few.
        RecipeError: the folder cannot be used.
        WorkerError: a worker failed.
    """
    from hocket.recipes.run_folder import make_folder
    from hocket.recipes.task import check_data
    from hocket.run.launch import launch

    check_data(resolved.recipe)
    folder = make_folder(resolved, run_dir)
    typer.echo(f"run: {folder}")
    settings = resolved.recipe.pipeline
    launch(
        ENTRY,
        [str(folder)],
        num_workers=settings.num_workers,
        run_dir=folder,
        timeout_s=settings.timeout_s,
    )


def show(resolved: Resolved) -> None:
    """Print the recipe as resolved, and check that its data can be loaded."""
    from hocket.recipes.course import Course
    from hocket.recipes.task import make_task

    task = make_task(resolved.recipe)
    course = Course.of(resolved.recipe, task.training)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    print(resolved.to_toml())
    print(
        f"{num_parameters:,} parameters; "
        f"{task.training.num_samples:,} samples to train on, "
        f"{task.evaluation.num_samples:,} to evaluate on; "
        f"{course.num_steps:,} steps, {course.steps_per_epoch:,} per epoch"
    )
