"""Write what `hocket bench` shows, as packaged data of hocket."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench.measure import write_result
from hocket.draw.quantity import seconds

Measured: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[str, ...]
Table: TypeAlias = dict[str, Any]  # title, rows with their head, legend

PACKAGED: Final = Path(__file__).parents[1] / "src" / "hocket" / "planner" / "published"
MEASURED_HEAD: Final[Row] = ("step", "", "measured", "", "simulated", "ideal")


def kept(path: Path) -> dict[str, Any]:
    """Read a measurement with the machine and the date."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_published(
    name: str,
    experiments: Iterable[dict[str, Any]],
    measured: Measured,
    tables: Sequence[Table],
) -> dict[str, Any]:
    """Write an experiment's results where `hocket bench NAME` reads them.

    Args:
        name: of the experiment.
        experiments: simulated, with keys that stay.
        measured: of the one that was.
        tables: the same for people.

    Returns:
        What was written.
    """
    document = {
        "experiments": [*experiments],
        "measured": dict(measured),
        "tables": [*tables],
    }
    write_result(PACKAGED / f"{name}.json", document)
    return document


def simulated_table(first: str, rows: Sequence[Row], legend: str) -> Table:
    """The table of simulated experiments.

    Args:
        first: the schedule that all are compared with.
        rows: with the head.
        legend: what the columns mean.
    """
    title = f"Times as fast as {first}. Simulated, on V100s in float32, and measured:"
    return {"title": [title], "rows": rows, "legend": legend}


def measured_table(
    measured: Measured, first: str, rounds: str, rows: Sequence[Row], legend: str
) -> Table:
    """The table of what was measured of BERT on MRPC, and where.

    Args:
        measured: with keys that stay.
        first: the contestant that all are compared with.
        rounds: how many, and of what.
        rows: with the head.
        legend: what the columns mean.
    """
    model, where = measured["model"], measured["environment"]
    title = [
        f"Measured: BERT with {model['num_blocks']} blocks of width {model['width']}, "
        f"fine-tuned on MRPC by {measured['num_devices']} CPU workers; batches of "
        f"{measured['batch_size']} in {measured['num_microbatches']} microbatches, "
        f"{measured['num_tokens']} tokens each.",
        f"{where['date']}, {where['num_cores']} cores of {where['processor']}, torch "
        f"{where['torch']}; medians of {rounds}, quartiles in brackets. Times as fast "
        f"as {first}:",
    ]
    return {"title": title, "rows": rows, "legend": legend}


def measured_cells(row: Measured) -> Row:
    """A contestant's step, and how often it fits into the first one's: six cells."""
    step, ratio = row["step"], row["times_as_fast"]
    return (
        seconds(step["median_ms"] / 1e3),
        f"({step['quartile_1_ms']:.0f} to {step['quartile_3_ms']:.0f} ms)",
        f"{ratio['of_medians']:.2f}",
        f"({ratio['quartile_1']:.2f} to {ratio['quartile_3']:.2f})",
        f"{row['simulated_times_as_fast']:.2f}",
        f"{row['ideal_times_as_fast']:.2f}",
    )
