"""`hocket search`: searches the best order of a schedule's work, and bounds its gap."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket.cli.shared.options import (
    JsonOption,
    ScheduleArgument,
    Sizes,
    UniformCosts,
    load_schedule,
    option,
    with_options,
)
from hocket.cli.shared.output import aligned, write_output
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import percent, seconds, short
from hocket.draw.summary import peak_activations, peak_microbatches
from hocket.errors import PlanError
from hocket.planner.search.optimum import search
from hocket.planner.search.result import SearchProgress, SearchResult, gap


@with_options
def search_command(
    source: ScheduleArgument,
    sizes: Sizes,
    costs: UniformCosts,
    memory_bytes: Annotated[
        int | None, option("N", "Of each device; no limit by default.", least=0)
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Never split a backward into I and W.")
    ] = False,
    time_limit: Annotated[
        float, option("S", "Seconds to search for.", least=0.0)
    ] = 60.0,
    threads: Annotated[int, option("N", "Of the solver.", least=1)] = 2,
    out: Annotated[Path | None, option("FILE", "Write the order.", "--out")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the best order of a schedule's work, and prove how good it is.

    The schedule's stages, on its devices, are what an order is searched for. All
    devices are equal and take the seconds given. Ctrl-C ends the search, and keeps the
    best so far.
    """
    given = load_schedule(source, sizes)
    if given.program.num_shards > 1:
        raise PlanError(
            f"{source} has {given.program.num_shards} shards, and gathers are not "
            "searched for: search with --replicas in place of them"
        )
    prices = costs.make()
    found = search(
        given.program,
        prices,
        memory_bytes,
        split_backward=not whole,
        time_limit_s=time_limit,
        num_threads=threads,
        progress=_show,
    )
    if out is not None:
        write_output(out, f"{found.schedule}\n")
        typer.echo(f"{out} written", err=True)
    rival, best = simulate(given, prices), simulate(found.schedule, prices)
    if as_json:
        import json

        typer.echo(json.dumps(_document(source, rival, best, found), indent=2))
    else:
        typer.echo("\n".join(_report(source, rival, best, found)))


def _show(progress: SearchProgress) -> None:
    """Print one line per progress report."""
    if isfinite(progress.makespan_s):
        best = f"{seconds(progress.makespan_s)}, gap {percent(progress.gap)}"
    else:
        best = "none yet"
    line = (
        f"{progress.elapsed_s:6.1f} s  best {best}, bound {seconds(progress.bound_s)}"
    )
    print(line, file=sys.stderr, flush=True)


def _document(
    source: str, given: Timeline, best: Timeline, found: SearchResult
) -> dict[str, Any]:
    return {
        "given": {"schedule": source, **_numbers(given, found.bound_s)},
        "found": {**_numbers(best, found.bound_s), "is_optimal": found.is_optimal},
        "bound_s": found.bound_s,
        "elapsed_s": found.elapsed_s,
        "order": str(found.schedule),
    }


def _numbers(timeline: Timeline, bound_s: float) -> dict[str, Any]:
    return {
        "makespan_s": timeline.makespan_s,
        "gap": gap(timeline.makespan_s, bound_s),
        "bubble_fraction": timeline.bubble_fraction,
        "peak_microbatches": max(peak_microbatches(timeline)),
        "peak_activations": max(peak_activations(timeline)),
        "peak_bytes": timeline.most_bytes,
    }


def _report(
    source: str, given: Timeline, best: Timeline, found: SearchResult
) -> Iterator[str]:
    rows = [("", "makespan", "gap", "bubble", "peak microbatches")]
    for name, timeline in ((source, given), ("found", best)):
        rows.append(
            (
                name,
                seconds(timeline.makespan_s),
                percent(gap(timeline.makespan_s, found.bound_s)),
                percent(timeline.bubble_fraction),
                short(max(peak_microbatches(timeline))),
            )
        )
    bound = ("bound", seconds(found.bound_s), "", "", "")
    yield from (line.rstrip() for line in aligned([*rows, bound]))
    yield ""
    if found.is_optimal:
        yield "Proved: none is faster than the one found."
    else:
        yield (
            f"An order may be faster by {percent(found.gap)} at most: a longer "
            "--time-limit may prove more."
        )
    kinds = [{span.op.kind for span in x.spans} for x in (given, best)]
    if Kind.BACKWARD_INPUT in kinds[1] - kinds[0]:
        yield "It splits backwards into I and W; with --whole it keeps them whole."
    yield ""
    yield str(found.schedule)
