"""`hocket share`: trains several recipes on one device at the same time."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hocket import env
from hocket.cli.shared.options import option
from hocket.cli.shared.output import write_output
from hocket.cli.train import SetOption, read_recipe
from hocket.errors import ConfigError
from hocket.recipes.config.resolve import Resolved

if TYPE_CHECKING:
    from hocket.sharing.running.job import Job

_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "B": 1, "": 1}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB|B|)")


def share_command(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE...", help="Built-in recipes, or TOML files."),
    ],
    memory: Annotated[
        str | None, option("SIZE", "The most that all hold, such as 20GiB.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="turns, lag, budget, tick-tock, free or auto.")
    ] = "auto",
    weights: Annotated[str, option("W,W", "Shares of the device's time.")] = "",
    max_steps: Annotated[int | None, option("N", "Steps of each.", least=1)] = None,
    settings: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Each run gets a folder of its own in it, with its name."),
    ] = None,
    resume: Annotated[
        str | None,
        option(
            "auto", "Go on from the newest checkpoints in --run-dir, if there are some."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="By default the first GPU, or else the CPU.")
    ] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="Run each in a process of its own.")
    ] = False,
    page: Annotated[
        Path | None, option("FILE", "Write an HTML page with lanes and memory.")
    ] = None,
) -> None:
    """Train several recipes on one device at the same time.

    Each trains exactly as it does alone, and leaves a folder with the recipe as
    resolved, metrics and checkpoints. --set replaces a value of each of them. The mode
    says which iteration may start when; auto measures, and takes the best that holds
    the memory.
    """
    if not processes:  # they share no memory, and torch's own allocator is faster
        env.CUDA_ALLOCATOR.set_default("backend:cudaMallocAsync")  # before torch loads
    own = list(settings or [])
    if max_steps is not None:
        own.append(f"training.max_steps={max_steps}")
    if resume is not None:
        own.append(f"checkpoint.resume={json.dumps(resume)}")
    named, folders = _recipes(recipes, own, run_dir)  # before torch is imported
    from hocket.recipes.training.shared import refuse_unshared
    from hocket.recipes.training.task import check_data
    from hocket.sharing.picture import share_page
    from hocket.sharing.running.job import Job
    from hocket.sharing.running.share import read_request, share

    for _, resolved in named:
        refuse_unshared(resolved.recipe)
        check_data(resolved.recipe)
    jobs = [
        Job(name, lambda _: ((lambda _: None), ()), weight=weight)
        for (name, _), weight in zip(named, _weights(weights, len(named)), strict=True)
    ]
    asked: dict[str, Any] = {
        "memory_bytes": None if memory is None else byte_count(memory),
        "mode": mode,
        "device": device,
        "processes": processes,
    }
    read_request(jobs, **asked)  # before folders are taken
    with ExitStack() as stack:
        report = share(_entered(named, jobs, folders, stack), **asked)
    typer.echo(str(report))
    for found in report.jobs:
        if losses := [x for x in found.losses if not isnan(x)]:  # nan: an evaluation
            typer.echo(f"{found.name}: last loss {losses[-1]:.4f}")
    if page is not None:
        write_output(page, share_page(report))
        typer.echo(f"page: {page}")
    report.check()


def _recipes(
    recipes: list[str], settings: list[str], run_dir: Path | None
) -> tuple[list[tuple[str, Resolved]], list[Path | None]]:
    """Return the recipes, each with the name of its job; and their folders, if named.

    Args:
        recipes: built-in recipes, or files.
        settings: for all of them.
        run_dir: gets the folders; each goes where its recipe says when not given.

    Raises:
        RecipeError: a recipe is not valid, or a folder cannot be used.
    """
    from hocket.recipes.training.run_folder import refuse_folder

    found = [read_recipe(name, settings) for name in recipes]
    stems = [Path(name).stem for name in recipes]
    names = [
        f"{stem}-{stems[: i + 1].count(stem)}" if stems.count(stem) > 1 else stem
        for i, stem in enumerate(stems)
    ]
    folders = [None if run_dir is None else run_dir / name for name in names]
    for resolved, own in zip(found, folders, strict=True):
        refuse_folder(resolved, own)
    return list(zip(names, found, strict=True)), folders


def _entered(
    recipes: list[tuple[str, Resolved]],
    jobs: list[Job],
    folders: list[Path | None],
    stack: ExitStack,
) -> list[Job]:
    """Return the jobs that train the recipes, each with a folder of its own.

    Args:
        recipes: the recipes, with the names of their jobs.
        jobs: names, weights and limits.
        folders: the jobs'; where None, in the folder that the recipe names.
        stack: releases the folders.

    Raises:
        RecipeError: a folder cannot be used.
        CheckpointError: another run is at work in a folder.
    """
    from hocket.recipes.training.run_folder import enter_folder
    from hocket.recipes.training.shared import recipe_job

    made = []
    for job, (name, resolved), own in zip(jobs, recipes, folders, strict=True):
        folder, lock = enter_folder(resolved, own)
        stack.callback(lock.release)
        typer.echo(f"{name}: {folder}")
        made.append(recipe_job(resolved.recipe, folder, job))
    return made


def byte_count(text: str) -> int:
    """Read a number of bytes with its unit.

    >>> byte_count("20GiB") == 20 * 2**30
    True

    Raises:
        ConfigError: the text is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory {text!r} is no size; write it as 20GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _weights(text: str, number: int) -> list[float]:
    if not text:
        return [1.0] * number
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != number:
        raise ConfigError(
            f"--weights {text!r}: give {number} numbers, one for each recipe, as 2,1"
        )
    return found
