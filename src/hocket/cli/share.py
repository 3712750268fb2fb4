"""`hocket share`: trains several recipes on one device at the same time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from hocket import env
from hocket.cli.shared.output import write_output
from hocket.errors import ConfigError

_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "B": 1, "": 1}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB|B|)")


def share_command(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE...", help="Built-in recipes, or TOML files."),
    ],
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most that all hold, such as 20GiB."),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="turns, lag, budget, tick-tock, free or auto.")
    ] = "auto",
    weights: Annotated[
        str, typer.Option(metavar="W,W", help="Shares of the device's time.")
    ] = "",
    max_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Iterations of each.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="For all of the recipes."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="By default the first GPU, or else the CPU.")
    ] = None,
    processes: Annotated[
        bool,
        typer.Option("--processes", help="Run each in a process of its own."),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page with lanes and memory."),
    ] = None,
) -> None:
    """Train several recipes on one device at the same time.

    Each trains exactly as it does alone. The mode says which iteration may start when;
    auto measures, and takes the best that holds the memory.
    """
    if not processes:  # they share no memory, and torch's own allocator is faster
        env.CUDA_ALLOCATOR.set_default("backend:cudaMallocAsync")  # before torch loads
    from hocket.cli.train import read_recipe
    from hocket.recipes.training.shared import recipe_job
    from hocket.sharing.page import share_page
    from hocket.sharing.running.job import Job
    from hocket.sharing.running.share import share

    shares = _weights(weights, len(recipes))
    jobs = []
    for i, (name, weight) in enumerate(zip(recipes, shares, strict=True)):
        resolved = read_recipe(name, list(settings or []))
        stem = Path(name).stem
        number = recipes[:i].count(name)
        title = f"{stem}-{number + 1}" if recipes.count(name) > 1 else stem
        job = Job(title, lambda _: ((lambda _: None), ()), weight=weight)
        jobs.append(recipe_job(resolved.recipe, job))
    report = share(
        jobs,
        memory_bytes=None if memory is None else byte_count(memory),
        mode=mode,
        num_iterations=max_steps,
        device=device,
        processes=processes,
    )
    typer.echo(str(report))
    for found in report.jobs:
        if found.losses:
            typer.echo(f"{found.name}: last loss {found.losses[-1]:.4f}")
    if page is not None:
        write_output(page, share_page(report))
        typer.echo(f"page: {page}")
    report.check()


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
