"""What all experiments of `hocket bench` print alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any, Final, TypeAlias

from hocket.cli.table import aligned
from hocket.draw.quantity import seconds

Measured: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[str, ...]

_COLUMNS: Final = 100  # of what is not a table

MEASURED_HEAD: Final[Row] = ("step", "", "measured", "", "simulated", "ideal")


def as_document(
    experiments: Iterable[dict[str, Any]], measured: Measured | None
) -> dict[str, Any]:
    """Plain values with keys that stay.

    Args:
        experiments: simulated.
        measured: of the one that was.
    """
    return {
        "experiments": [*experiments],
        "measured": None if measured is None else dict(measured),
    }


def page(
    first: str, table: Sequence[Row], legend: str, measured: Iterable[str] | None
) -> Iterator[str]:
    """The same as lines of text.

    Args:
        first: whose times are counted in what.
        table: of the experiments, with its head.
        legend: of the table.
        measured: what was measured, where anything was.
    """
    yield f"Times as fast as {first}. Simulated, on V100s in float32, and measured:"
    yield ""
    yield from aligned(table)
    yield ""
    yield from wrap(legend, _COLUMNS)
    yield ""
    if measured is None:
        yield "Measured: nothing is kept here; --measure --data FOLDER does it."
    else:
        yield from measured


def measured_table(
    measured: Measured, first: str, rounds: str, table: Sequence[Row], legend: str
) -> Iterator[str]:
    """What was measured of BERT on MRPC, and where.

    Args:
        measured: with keys that stay.
        first: whose times are counted in what.
        rounds: how many, and of what.
        table: with its head.
        legend: of the table.
    """
    model, where = measured["model"], measured["environment"]
    yield (
        f"Measured: BERT with {model['num_blocks']} blocks of width {model['width']}, "
        f"fine-tuned on MRPC by {measured['num_devices']} CPU workers; batches of "
        f"{measured['batch_size']} in {measured['num_microbatches']} microbatches, "
        f"{measured['num_tokens']} tokens each."
    )
    yield (
        f"{where['date']}, {where['num_cores']} cores of {where['processor']}, torch "
        f"{where['torch']}; medians of {rounds}, quartiles in brackets. Times as fast "
        f"as {first}:"
    )
    yield ""
    yield from aligned(table)
    yield ""
    yield from wrap(legend, _COLUMNS)


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
