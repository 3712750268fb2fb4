"""`hocket train`: trains a recipe on local workers or inside torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from hocket import env
from hocket.cli.shared.options import option
from hocket.core.layout import WorkerLayout
from hocket.errors import ConfigError
from hocket.recipes.config.resolve import SET_ORIGIN, Resolved, resolve

ENTRY: Final = "hocket.recipes.training.train:main"

RecipeArgument = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A built-in recipe, or a TOML file.")
]
SetOption = Annotated[
    list[str] | None, option("KEY=VALUE", "Replace a value of the recipe.", "--set")
]
WorkersOption = Annotated[
    int | None, option("N", "Processes; more than GPUs share them.")
]
LayoutOption = Annotated[
    str | None,
    option(
        "DxR[xS]",
        "Devices per pipeline x replicas, such as 4x2, x shards where there are any, "
        "such as 4x2x2; replaces these numbers.",
    ),
]
OutsideOption = Annotated[
    bool,
    typer.Option(
        "--allow-outside",
        help="Let the recipe's file name paths and modules outside of its folder.",
    ),
]


def train_command(
    recipe: RecipeArgument,
    settings: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="An empty or new folder; with --resume auto, a run's own."),
    ] = None,
    workers: WorkersOption = None,
    layout: LayoutOption = None,
    resume: Annotated[
        str | None,
        option(
            "auto|PATH",
            "Go on from the newest checkpoint in --run-dir, if there is one; or "
            "from a checkpoint, or a run's folder, which must be there.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        option(
            "N",
            "How often the workers are started again after a failure, to go on "
            "from the last checkpoint.",
            least=0,
        ),
    ] = None,
    allow_outside: OutsideOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and stop.")
    ] = False,
) -> None:
    """Train a recipe on local workers, or as one of torchrun's.

    Leaves a folder with the recipe as resolved, metrics as JSON lines and for
    TensorBoard, checkpoints if the recipe wants some, and report.html with the
    predicted and the measured timeline.
    """
    settings = with_workers(settings, workers, layout)
    if resume is not None:
        settings.append(f"checkpoint.resume={json.dumps(resume)}")
    if not (dry_run or env.RANK.is_set):
        from hocket.recipes.training.run_folder import refuse_folder

        found = read_recipe(recipe, settings, allow_outside=allow_outside)
        refuse_folder(found, run_dir)
    resolved = recipe_here(recipe, settings, allow_outside=allow_outside)
    if dry_run:
        show(resolved)
    elif env.RANK.is_set:
        from hocket.recipes.training.train import train_in_job

        if max_restarts is not None:  # a worker cannot start the others again
            raise ConfigError(
                f"--max-restarts {max_restarts}: these workers were started by "
                "torchrun, and it starts them again: give it its own --max-restarts"
            )
        train_in_job(resolved, run_dir)
    else:
        start_workers(resolved, run_dir, max_restarts or 0)


def read_recipe(
    recipe: str, settings: list[str], *, allow_outside: bool = False
) -> Resolved:
    """Return the recipe with its settings; check that its functions can be imported.

    Raises:
        RecipeError: the recipe is not valid.
    """
    resolved = resolve(recipe, settings, allow_outside=allow_outside)
    sys.path[:0] = map(str, resolved.import_folders)
    return resolved


def recipe_here(recipe: str, settings: list[str], *, allow_outside: bool) -> Resolved:
    """Return a recipe for this machine: with no more workers than it has GPUs.

    Where the command line says how many, they share the GPUs. What differs is said.

    Raises:
        RecipeError: the recipe is not valid, or not with so few workers.
    """
    found = read_recipe(recipe, settings, allow_outside=allow_outside)
    from hocket import cuda  # imports torch, which a faulty recipe need not wait for

    wanted, num_gpus = found.recipe.pipeline, cuda.num_devices()
    num = 0 if env.DEVICE.text() == "cpu" else wanted.num_workers
    if env.RANK.is_set or env.BACKEND.is_set or not 0 < num_gpus < num:
        return found
    said = {found.origins.get(("pipeline", x)) for x in ("num_workers", "layout")}
    if SET_ORIGIN in said:
        env.BACKEND.set_default("gloo")
        what = (
            f"{num} workers share {num_gpus} of them: they compute in turns, and each "
            f"message goes by way of the host (gloo). --workers {num_gpus} is faster"
        )
    else:
        depth = wanted.num_devices
        num_pipelines = max(1, num_gpus // depth)
        num_shards = min(wanted.num_shards, num_pipelines)
        layout = str(
            WorkerLayout(min(depth, num_gpus), num_pipelines // num_shards, num_shards)
        )
        settings = with_workers(settings, None, layout)
        what = f"the layout is {layout}; --workers {num}, the recipe's, share them"
    typer.echo(f"GPUs on this machine: {num_gpus}; {what}", err=True)
    return read_recipe(recipe, settings, allow_outside=allow_outside)


def run_workers(
    entry: str, resolved: Resolved, num_workers: int, *arguments: Any
) -> dict[str, Any]:
    """Start workers on a recipe in a temporary folder; return rank 0's result.

    Args:
        entry: `module:function`, called with the folder and the arguments.
        resolved: the recipe.
        num_workers: the number of workers.
        arguments: further arguments of the function, as JSON.

    Raises:
        DataError: the user's data are missing or too few.
        WorkerError: a worker failed.
    """
    from hocket.recipes.training.run_folder import claim_folder
    from hocket.recipes.training.task import check_data
    from hocket.run.cluster.launch import launch

    check_data(resolved.recipe)
    with TemporaryDirectory(prefix="hocket-") as name:
        results: list[dict[str, Any]] = launch(
            entry,
            [name, *arguments],
            num_workers=num_workers,
            run_dir=claim_folder(Path(name), resolved.to_toml()),
            timeout_s=resolved.recipe.pipeline.timeout_s,
        )
    return results[0]


def with_workers(
    settings: list[str] | None, workers: int | None, layout: str | None
) -> list[str]:
    """Return settings, with those of `--workers` or torchrun, and of `--layout`.

    A layout replaces the recipe's own numbers.
    """
    found = list(settings or [])
    if layout is not None:
        numbers = ("num_workers", "num_replicas", "num_shards")
        found += [f"pipeline.{name}=" for name in numbers]
        found.append(f"pipeline.layout={json.dumps(layout)}")
    if env.RANK.is_set:
        workers = env.WORLD_SIZE.integer()
    if workers is not None:
        found.append(f"pipeline.num_workers={workers}")
    return found


def start_workers(
    resolved: Resolved, run_dir: Path | None, max_restarts: int = 0
) -> None:
    """Make the run's folder, start the workers, and wait for them.

    Args:
        resolved: the recipe.
        run_dir: an empty or new folder; one with the time in its name if not given.
        max_restarts: how often all workers are started again after a failure.

    Raises:
        DataError: the user's data are missing or too few.
        RecipeError: the folder cannot be used.
        CheckpointError: another run is at work in the folder.
        WorkerError: a worker failed.
    """
    from hocket.recipes.training.run_folder import enter_folder
    from hocket.recipes.training.task import check_data
    from hocket.run.cluster.launch import launch

    check_data(resolved.recipe)
    folder, lock = enter_folder(resolved, run_dir)
    typer.echo(f"run: {folder}")
    settings = resolved.recipe.pipeline
    try:
        launch(
            ENTRY,
            [str(folder)],
            num_workers=settings.num_workers,
            run_dir=folder,
            timeout_s=settings.timeout_s,
            max_restarts=max_restarts,
        )
    finally:
        lock.release()


def show(resolved: Resolved) -> None:
    """Print the recipe as resolved, and check that its data can be loaded."""
    from hocket.recipes.training.task import make_task

    task = make_task(resolved.recipe)
    num_parameters = sum(x.numel() for x in task.make_model().parameters())
    print(resolved.to_toml())
    print(
        f"{num_parameters:,} parameters; "
        f"{task.training.num_samples:,} samples to train on, "
        f"{task.evaluation.num_samples:,} to evaluate on; "
        f"{task.num_steps:,} steps; {task.batches_per_epoch:,} batches per epoch"
    )
