"""The cells of a plan's table, and which columns fit a width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from hocket.draw.quantity import Unit, byte_size, byte_unit, percent, short
from hocket.planner.candidate import Outcome
from hocket.planner.ranking.ranking import RankedOutcomes, Row

GAP: Final = 1  # spaces between two columns
NAME_WIDTH: Final = 16  # of the first column: the longest name of one schedule


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Args:
        head: its name, in one line or two.
        cell: writes the text of an outcome.
        place: columns of a lower place are kept longer where width is short.
    """

    head: str
    cell: Callable[[Outcome, RankedOutcomes], str]
    place: int

    def width(self, outcomes: Iterable[Outcome], ranking: RankedOutcomes) -> int:
        """Return the characters that its texts need."""
        texts = [*self.head.split("\n"), *(self.cell(x, ranking) for x in outcomes)]
        return max(map(len, texts))


def columns(ranking: RankedOutcomes) -> tuple[Column, ...]:
    """Return all columns after the name, as they stand in the table."""
    unit = unit_of(ranking)

    def kind(name: str, place: int, *parts: str) -> Column:
        def cell(outcome: Outcome, _: RankedOutcomes) -> str:
            return unit.number(sum(getattr(outcome.fullest, part) for part in parts))

        return Column(name, cell, place)

    return (
        Column("layout", _layout, 1),
        Column("stages", lambda x, _: str(x.candidate.num_stages), 3),
        Column("micro-\nbatches", _microbatches, 2),
        Column("samples\nper s", lambda x, _: short(x.samples_per_s), 0),
        Column("bubble", lambda x, _: percent(x.bubble_fraction), 4),
        Column("limited\nby", lambda x, ranking: ranking.limit_of(x), 5),
        Column(f"peak\n{unit.name}", lambda x, _: unit.number(x.peak_bytes), 6),
        Column("gap", lambda x, _: percent(x.gap), 7),
        Column("messages", lambda x, _: byte_size(x.message_bytes), 8),
        kind("weights", 9, "weight_bytes", "version_bytes"),
        kind("gradients", 10, "gradient_bytes"),
        kind("optimizer", 11, "optimizer_bytes"),
        kind("activations", 12, "activation_bytes"),
    )


def fitting(
    columns: Sequence[Column],
    outcomes: Sequence[Outcome],
    ranking: RankedOutcomes,
    width: int,
) -> tuple[Column, ...]:
    """Return the columns that fit beside the name, in their order.

    Args:
        columns: all columns.
        outcomes: the rows.
        ranking: the ranking of the rows.
        width: the characters of a line.
    """
    left = width - NAME_WIDTH - 2
    kept = set()
    for column in sorted(columns, key=lambda column: column.place):
        left -= GAP + column.width(outcomes, ranking)
        if left < 0:
            break
        kept.add(column.head)
    return tuple(column for column in columns if column.head in kept)


def name_of(row: Row) -> str:
    """Return the names of a row: those of equal outcomes are joined."""
    marks = ("*" if outcome.delay else "" for outcome in row)
    names = (outcome.candidate.schedule for outcome in row)
    joined = " = ".join(map("".join, zip(names, marks, strict=True)))
    return joined + (" (recompute)" if row[0].candidate.recomputes else "")


def unit_of(ranking: RankedOutcomes) -> Unit:
    """Return the unit in which the best outcome's memory reads best."""
    return byte_unit(ranking.outcomes[0].peak_bytes)


def stale_columns(ranking: RankedOutcomes) -> tuple[str, ...]:
    """Return the column names for orders with stale weights."""
    unit = unit_of(ranking).name
    return (
        "delay",
        "versions of each stage",
        f"newest {unit}",
        f"older {unit}",
        "copies",
    )


def stale_cells(outcome: Outcome, ranking: RankedOutcomes) -> tuple[str, ...]:
    """Return a text per name of `stale_columns`, for the fullest device."""
    split, unit = outcome.fullest, unit_of(ranking)
    copies = 1 + split.version_bytes / split.weight_bytes if split.weight_bytes else 1
    return (
        str(outcome.delay),
        _runs(outcome.num_versions),
        unit.number(split.weight_bytes),
        unit.number(split.version_bytes),
        f"{copies:.2f}",
    )


def _layout(outcome: Outcome, _: RankedOutcomes) -> str:
    candidate = outcome.candidate
    return f"{candidate.num_devices}x{candidate.num_replicas}"


def _microbatches(outcome: Outcome, ranking: RankedOutcomes) -> str:
    candidate = outcome.candidate
    size = candidate.samples_of_microbatch(ranking.batch_size)
    return f"{candidate.num_microbatches} of {size}"


def _runs(numbers: tuple[int, ...]) -> str:
    """Format runs of equal numbers: `2 x 4, 1 x 4`."""
    return ", ".join(f"{key} x {len(list(of))}" for key, of in groupby(numbers))
