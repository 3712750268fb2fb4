"""`hocket compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hocket.cli.shared.output import aligned, write_output

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, as `hocket train` left.")
]


def compare_command(
    first: RunArgument,
    second: RunArgument,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the curves.")
    ] = None,
) -> None:
    """Compare two runs: settings, losses, step time by cause, memory.

    Says which settings differ, and the first step at which the losses part.
    """
    from hocket.recipes.compare_runs import RunComparison, RunFolderFiles

    compared = RunComparison(RunFolderFiles.read(first), RunFolderFiles.read(second))
    if html is not None:
        from hocket.draw.html import to_html

        page = to_html(
            compared.timelines((first, second)),
            f"{compared.first.name} and {compared.second.name}",
            summary=compared.sentence,
            leading=compared.tables,
            charts=(compared.chart,),
        )
        write_output(html, page)
        typer.echo(f"{html} written", err=True)
    for table in compared.tables:
        typer.echo(f"{table.title}\n")
        rows = table.rows or (("none", *("",) * (len(table.head) - 1)),)
        lines = aligned([table.head, *rows])
        typer.echo("\n".join(line.rstrip() for line in lines) + "\n")
    typer.echo(compared.sentence)
