"""`hocket bench`: published experiments, as the simulator has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hocket.cli.table import aligned
from hocket.errors import PlanError

if TYPE_CHECKING:
    from hocket.planner.experiments.ooo_pipeline import Result

_NAMES: Final = ("ooo-pipeline",)


def bench_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="ooo-pipeline.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON.")
    ] = False,
) -> None:
    """Repeat a published experiment on the simulator, beside what was published.

    ooo-pipeline: BERT, GPT-3 Medium, an RNN and an FFNN on 4 to 32 V100s, by
    out-of-order backprop and by all other schedules, beside GPipe.
    """
    if name not in _NAMES:
        raise PlanError(f"no experiment is named {name!r}; there is {_NAMES[0]}")
    from hocket.planner.experiments.ooo_pipeline import results

    found = [*results()]
    if as_json:
        import json

        typer.echo(json.dumps([*map(_document, found)], indent=2))
    else:
        typer.echo("\n".join(_report(found)))


def _document(result: Result) -> dict[str, Any]:
    from hocket.planner.experiments.ooo_pipeline import PUBLISHED

    experiment = result.experiment
    return {
        "experiment": experiment.name,
        "num_devices": experiment.num_devices,
        "num_nodes": experiment.num_nodes,
        "batch_size": experiment.batch_size,
        "num_microbatches": experiment.num_microbatches,
        "published": list(PUBLISHED) if experiment.is_published else None,
        "gpipe_s": result.gpipe_s,
        "fast_forward": result.fast_forward,
        "modulo": result.modulo or None,
        "group_size": result.group_size or None,
        "best": {"schedule": result.best[0], "times": result.best[1]},
        "limit": result.limit,
    }


def _report(found: list[Result]) -> Iterator[str]:
    from hocket.draw.quantity import seconds
    from hocket.planner.experiments.ooo_pipeline import PUBLISHED

    yield "Simulated: times as fast as GPipe, on V100s in float32."
    yield ""
    rows: list[tuple[str, ...]] = [
        (
            *("experiment", "devices", "microbatches", "gpipe", "published"),
            *("fast-forward", "modulo", "group of", "best", "", "limit"),
        )
    ]
    for result in found:
        experiment = result.experiment
        low, high = PUBLISHED
        nodes = experiment.num_nodes
        rows.append(
            (
                experiment.name,
                f"{experiment.num_devices}" + (f" in {nodes}" if nodes > 1 else ""),
                str(experiment.num_microbatches),
                seconds(result.gpipe_s),
                f"{low} to {high}" if experiment.is_published else "",
                f"{result.fast_forward:.2f}",
                f"{result.modulo:.2f}" if result.modulo else "",
                str(result.group_size or ""),
                f"{result.best[1]:.2f}",
                result.best[0],
                f"{result.limit:.2f}",
            )
        )
    yield from aligned(rows)
    yield ""
    yield (
        "published: of all experiments of the paper together. group of: layers that go "
        "to one device together. best: of all schedules that fit the memory, whatever "
        "their stages. limit: no order on gpipe's stages is faster."
    )
