"""`hocket plan`: ranks every way to train a recipe on some devices."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hocket.cli.shared.options import option
from hocket.cli.shared.output import write_output
from hocket.cli.train import OutsideOption, SetOption, read_recipe, run_workers
from hocket.errors import PlanError

if TYPE_CHECKING:
    from hocket.core.layout import WorkerLayout
    from hocket.planner.rank import PlanConfig, Progress
    from hocket.planner.ranking.report import Shown
    from hocket.planner.ranking.table import Paper
    from hocket.recipes.config.resolve import Resolved


ENTRY: Final = "hocket.recipes.training.train:planned"

_MOST_COLUMNS: Final = 160
_FILE_COLUMNS: Final = 100  # of what is no terminal, unless COLUMNS says them


def plan_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A built-in recipe, a TOML file, a config.json of the transformers "
            "library (or its folder), or a network that is counted by hand, such as "
            "bert-24.",
        ),
    ],
    devices: Annotated[
        int | None, option("N", "How many there are.", "--devices", "-d", least=1)
    ] = None,
    layout: Annotated[
        str | None,
        option(
            "DxRxS",
            "Only pipelines of D devices in R replicas, each stage in S shards: 4x2, "
            "4x2x2. In place of --devices.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        option(
            "NAME",
            "Kind of device, such as v100-32g; else this machine's is measured.",
        ),
    ] = None,
    links: Annotated[
        str | None,
        option(
            "NAME",
            "What joins the devices of a node, such as nvlink2 or pcie; by default the "
            "fastest that they have.",
        ),
    ] = None,
    nodes: Annotated[int, option("N", "Machines that share them evenly.", least=1)] = 1,
    network: Annotated[
        str | None, option("NAME", "What joins the nodes; by default 100gb.")
    ] = None,
    batch_size: Annotated[
        int | None,
        option("N", "Samples per step; else the recipe's, or 8 a device.", least=1),
    ] = None,
    tokens: Annotated[
        int | None,
        option("N", "Length of a sample, for a config.json; by default 2048.", least=1),
    ] = None,
    precision: Annotated[
        str | None,
        option(
            "NAME",
            "float32, tf32, bfloat16, float16 or bfloat16-weights; by default the "
            "recipe's.",
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        option("X", "What the model may use of a device.", "--memory-gib", least=0.0),
    ] = None,
    hardware_file: Annotated[
        Path | None, option("FILE", "TOML of further devices and links.")
    ] = None,
    max_delay: Annotated[
        int, option("N", "Allow orders with weights up to N updates old.", least=0)
    ] = 0,
    settings: SetOption = None,
    allow_outside: OutsideOption = False,
    rows: Annotated[int, option("N", "The table's rows, at most.", least=1)] = 12,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Simulate also what cannot be among the best; show all rows and "
            "columns.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all outcomes as JSON.")
    ] = False,
    html: Annotated[Path | None, option("FILE", "Write a page with pictures.")] = None,
    costs_out: Annotated[
        Path | None,
        option(
            "FILE", "Write the costs of the best pipeline, for hocket simulate --costs."
        ),
    ] = None,
) -> None:
    """Plan: every way to train a recipe on so many devices, the best first.

    Predicts samples per second, bubble, memory and messages of every schedule, number
    of stages and replicas, microbatch count, with and without recomputation; and of
    plain data parallelism. Such as:

    hocket plan digits-vit --devices 4

    hocket plan bert-24 --devices 8 --nodes 2 --hardware a100-80g
    """
    from hocket.planner.published.catalogue import NETWORKS, plan_network
    from hocket.planner.rank import PlanConfig, Search
    from hocket.planner.ranking.report import Shown

    num_devices, only = _devices(devices, layout)
    config = PlanConfig(
        num_devices=num_devices,
        hardware=hardware,
        links=links,
        num_nodes=nodes,
        network=network,
        batch_size=batch_size,
        precision=precision,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
        hardware_file=None if hardware_file is None else str(hardware_file.absolute()),
        search=Search(
            num_devices=None if only is None else (only.num_devices,),
            num_shards=None if only is None else (only.num_shards,),
            num_best=rows,
            is_exhaustive=exhaustive,
            max_delay=max_delay,
        ),
    )
    config.cluster()  # refuses unknown names before torch is imported
    paper = _paper(rows, has_page=html is not None, has_all=exhaustive)
    path = Path(recipe)
    is_config = path.suffix == ".json" or (path / "config.json").is_file()
    if settings and (is_config or recipe in NETWORKS):
        raise typer.BadParameter(f"--set is for recipes: {recipe} is none")
    if tokens is not None and not is_config:
        raise typer.BadParameter(f"--tokens is for a config.json: {recipe} is none")
    if recipe in NETWORKS:
        with status_line("reading the network") as status:
            ranking = plan_network(recipe, config, status)
        shown = Shown.of(ranking, paper)
    elif is_config:
        with status_line("capturing the model") as status:
            from hocket.recipes.models.by_config import plan_config

            ranking = plan_config(path, tokens, config, status)
        shown = Shown.of(ranking, paper)
    else:
        resolved = read_recipe(recipe, settings or [], allow_outside=allow_outside)
        shown = plan_and_show(resolved, config, paper)
    if html is not None:
        write_output(html, shown.page)
        typer.echo(f"{html} written", err=True)
    if costs_out is not None:
        if not shown.costs:
            raise PlanError("no pipeline fits, so there are no costs to write")
        write_output(costs_out, shown.costs + "\n")
        typer.echo(f"{costs_out} written: {shown.simulation} {costs_out}", err=True)
    typer.echo(json.dumps(shown.document, indent=2) if as_json else shown.text)


def _devices(
    num_devices: int | None, layout: str | None
) -> tuple[int, WorkerLayout | None]:
    """Return the number of all devices; and their layout, if it is given."""
    from hocket.core.layout import WorkerLayout

    if layout is None:
        if num_devices is None:
            raise typer.BadParameter("say how many: --devices N, or --layout DxR")
        return num_devices, None
    wanted = WorkerLayout.parse(layout)
    if num_devices not in (None, wanted.num_workers):
        raise typer.BadParameter(
            f"--layout {layout} is {wanted.num_workers} devices, --devices says "
            f"{num_devices}: leave one of them out"
        )
    return wanted.num_workers, wanted


def plan_and_show(resolved: Resolved, config: PlanConfig, paper: Paper) -> Shown:
    """Plan and print; measure with workers of this machine if it is for it.

    It is not where a kind of device or of links is named, or more devices than it has.

    Args:
        resolved: the recipe.
        config: what to plan for.
        paper: how to show it.

    Raises:
        DataError: the recipe's data are missing or too few.
        PlanError: a name that is not known, or numbers that nothing fits.
        WorkerError: a worker failed.
    """
    from hocket.garbage import no_collections
    from hocket.planner.ranking.report import Shown

    is_here = config.hardware is None and config.links is None
    if is_here and _has(config.num_devices):
        num, values = config.num_devices, (asdict(config), asdict(paper))
        typer.echo(f"measuring on {num} workers of this machine", err=True)
        return Shown(**run_workers(ENTRY, resolved, num, *values))
    with status_line("capturing and measuring the model") as status:
        with no_collections():
            from hocket.recipes.training.train import plan_recipe

        ranking = plan_recipe(resolved, config, progress=status)
    return Shown.of(ranking, paper)


def _has(num_devices: int) -> bool:
    """Return whether this machine has several devices, and as many."""
    from hocket import cuda

    num_gpus = cuda.num_devices()
    return 1 < num_devices <= (num_gpus or len(os.sched_getaffinity(0)))


def _paper(num_rows: int, *, has_page: bool, has_all: bool) -> Paper:
    from hocket.planner.ranking.table import Paper

    width = min(_MOST_COLUMNS, get_terminal_size((_FILE_COLUMNS, 24)).columns)
    is_terminal = sys.stdout.isatty()
    return Paper(num_rows, width, is_terminal, has_page, has_all)


@contextmanager
def status_line(first: str) -> Iterator[Progress]:
    """Show on a terminal how far planning has come, and erase the line at the end.

    Only if standard error is a terminal, so that files and pipes stay clean.

    Args:
        first: what is done before candidates are counted.
    """
    from rich.console import Console

    with Console(stderr=True).status(f"planning: {first}") as status:
        yield lambda num_done, num_all: status.update(
            f"planning: {num_done:,} of {num_all:,} candidates"
        )
