"""`hocket plan`: every way to train a recipe on so many devices, the best first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from hocket.cli.train import OutsideOption, RecipeArgument, SetOption, read_recipe

if TYPE_CHECKING:
    from hocket.planner.ranking import Ranking
    from hocket.recipes.resolve import Resolved

_MOST_COLUMNS = 160


@dataclass(frozen=True, slots=True)
class Devices:
    """The options that say what there would be to train on."""

    num_devices: int
    hardware: str | None
    links: str | None
    num_nodes: int
    network: str | None
    memory_gib: float | None
    hardware_file: Path | None


def plan_command(
    recipe: RecipeArgument,
    devices: Annotated[
        int, typer.Option("--devices", "-d", metavar="N", min=1, help="All of them.")
    ],
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Their kind, such as v100-32g; by default the model is measured here.",
        ),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Between devices of a node, such as nvlink2 or pcie; by default the "
            "fastest that they have.",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(metavar="N", min=1, help="That the devices are in, evenly.")
    ] = 1,
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Between nodes, by default 100gb."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples per step; the recipe's else."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, tf32, bfloat16 or float16; by default the recipe's.",
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory-gib", metavar="X", min=0.0, help="Of each device, for the model."
        ),
    ] = None,
    hardware_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML: more devices and links, or changed."),
    ] = None,
    settings: SetOption = None,
    allow_outside: OutsideOption = False,
    rows: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of the table: the best so many.")
    ] = 12,
    exhaustive: Annotated[
        bool,
        typer.Option("--all", help="Simulate also what cannot be among the best."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all outcomes as JSON.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures.")
    ] = None,
) -> None:
    """Plan: every way to train a recipe on so many devices, the best first.

    Predicts samples per second, bubble, memory and messages of every schedule, number
    of stages and replicas, microbatch count, with and without recomputation; and of
    plain data parallelism.
    """
    wanted = Devices(
        devices, hardware, links, nodes, network, memory_gib, hardware_file
    )
    ranking = plan_recipe(
        read_recipe(recipe, settings or [], allow_outside=allow_outside),
        wanted,
        batch_size=batch_size,
        precision=precision,
        is_exhaustive=exhaustive,
    )
    if html is not None:
        _write_page(html, ranking)
    if as_json:
        typer.echo(json.dumps(ranking.to_json(), indent=2))
    else:
        _show(ranking, rows)


def plan_recipe(
    resolved: Resolved,
    devices: Devices,
    *,
    batch_size: int | None,
    precision: str | None,
    is_exhaustive: bool,
) -> Ranking:
    """Predict every way to train a recipe.

    Args:
        resolved: the recipe.
        devices: to train it on.
        batch_size: samples per step; the recipe's when not given.
        precision: of the forward; the recipe's when not given.
        is_exhaustive: simulate also what cannot be among the best.

    Raises:
        DataError: its data are missing or too few.
        PlanError: a name that is not known, or numbers that nothing fits.
    """
    from hocket.planner.rank import Search
    from hocket.recipes.course import Course
    from hocket.recipes.optimizer import make_optimizer
    from hocket.recipes.task import make_task
    from hocket.run.planning import plan

    task = make_task(resolved.recipe)
    course = Course.of(resolved.recipe, task.training)
    training = resolved.recipe.training
    memory_gib = devices.memory_gib
    return plan(
        task.make_model(),
        next(iter(course.loader())),
        task.loss,
        num_devices=devices.num_devices,
        hardware=devices.hardware,
        links=devices.links,
        num_nodes=devices.num_nodes,
        network=devices.network,
        optimizer=make_optimizer(resolved.recipe.optimizer),
        batch_size=training.batch_size if batch_size is None else batch_size,
        precision=training.precision if precision is None else precision,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
        hardware_file=devices.hardware_file,
        search=Search(is_exhaustive=is_exhaustive),
    )


def _show(ranking: Ranking, num_rows: int) -> None:
    import sys

    from rich.console import Console

    from hocket.planner.table import show, to_text

    if sys.stdout.isatty():
        width = min(_MOST_COLUMNS, get_terminal_size((124, 24)).columns)
        show(ranking, Console(width=width), num_rows=num_rows)
    else:
        typer.echo(to_text(ranking, num_rows=num_rows))


def _write_page(path: Path, ranking: Ranking) -> None:
    from hocket.planner.report import to_html

    try:
        path.write_text(to_html(ranking), encoding="utf-8")
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        raise typer.BadParameter(reason) from None
    typer.echo(f"{path} written", err=True)
