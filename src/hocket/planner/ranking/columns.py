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
    cell: Callable[[Outcome], str]
    place: int = 0

    def width(self, outcomes: Iterable[Outcome]) -> int:
        """Return the characters that its texts need."""
        texts = [*self.head.split("\n"), *map(self.cell, outcomes)]
        return max(map(len, texts))


def columns(ranking: RankedOutcomes) -> tuple[Column, ...]:
    """Return all columns after the name, as they stand in the table."""
    unit = unit_of(ranking)

    def microbatches(outcome: Outcome) -> str:
        candidate = outcome.candidate
        size = candidate.samples_of_microbatch(ranking.batch_size)
        return f"{candidate.num_microbatches} of {size}"

    def kind(name: str, place: int, *parts: str) -> Column:
        def cell(outcome: Outcome) -> str:
            return unit.number(sum(getattr(outcome.fullest, part) for part in parts))

        return Column(name, cell, place)

    return (
        Column("layout", lambda x: str(x.candidate.layout), 1),
        Column("stages", lambda x: str(x.candidate.num_stages), 3),
        Column("micro-\nbatches", microbatches, 2),
        Column("samples\nper s", lambda x: short(x.samples_per_s), 0),
        Column("bubble", lambda x: percent(x.bubble_fraction), 4),
        Column("limited\nby", ranking.limit_of, 5),
        Column(f"peak\n{unit.name}", lambda x: unit.number(x.peak_bytes), 6),
        Column("gap", lambda x: percent(x.gap), 7),
        Column("messages", lambda x: byte_size(x.message_bytes), 8),
        kind("weights", 9, "weight_bytes", "version_bytes"),
        kind("gradients", 10, "gradient_bytes"),
        kind("optimizer", 11, "optimizer_bytes"),
        kind("activations", 12, "activation_bytes"),
    )


def fitting(
    columns: Sequence[Column],
    outcomes: Sequence[Outcome],
    width: int,
) -> tuple[Column, ...]:
    """Return the columns that fit beside the name, in their order.

    Args:
        columns: all columns.
        outcomes: the rows.
        width: the characters of a line.
    """
    left = width - NAME_WIDTH - 2
    kept = set()
    for column in sorted(columns, key=lambda column: column.place):
        left -= GAP + column.width(outcomes)
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


def stale_columns(ranking: RankedOutcomes) -> tuple[Column, ...]:
    """Return the columns for orders with stale weights; bytes: the fullest device's."""
    unit = unit_of(ranking)
    return (
        Column("delay", lambda x: str(x.delay)),
        Column("versions of each stage", lambda x: _runs(x.num_versions)),
        Column(f"newest {unit.name}", lambda x: unit.number(x.fullest.weight_bytes)),
        Column(f"older {unit.name}", lambda x: unit.number(x.fullest.version_bytes)),
        Column("copies", _copies),
    )


def _copies(outcome: Outcome) -> str:
    """Format how many copies of its weights the fullest device holds."""
    newest, older = outcome.fullest.weight_bytes, outcome.fullest.version_bytes
    return f"{1 + older / newest if newest else 1:.2f}"


def _runs(numbers: tuple[int, ...]) -> str:
    """Format runs of equal numbers: `2 x 4, 1 x 4`."""
    return ", ".join(f"{key} x {len(list(of))}" for key, of in groupby(numbers))
