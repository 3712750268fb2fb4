"""`hocket compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hocket.cli.shared.output import aligned

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, as `hocket train` left.")
]


def compare_command(first: RunArgument, second: RunArgument) -> None:
    """Compare two runs: settings, losses, step time by cause, memory.

    Says which settings differ, and the first step at which the losses part.
    """
    from hocket.recipes.compare_runs import RunComparison, RunFolderFiles

    compared = RunComparison(RunFolderFiles.read(first), RunFolderFiles.read(second))
    for table in compared.tables:
        typer.echo(f"{table.title}\n")
        rows = table.rows or (("none", *("",) * (len(table.head) - 1)),)
        lines = aligned([table.head, *rows])
        typer.echo("\n".join(line.rstrip() for line in lines) + "\n")
    typer.echo(compared.sentence)
