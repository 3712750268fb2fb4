"""A ranking as an HTML page: candidates as points, the best step, and all numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from hocket.draw import html
from hocket.draw.html import Facts, Figure, Table
from hocket.draw.quantity import byte_size, percent, short
from hocket.errors import PlanError
from hocket.planner.candidate import Outcome
from hocket.planner.ranking.ranking import Ranking
from hocket.planner.ranking.scatter import to_svg
from hocket.planner.ranking.table import (
    cells,
    choice,
    columns,
    head,
    stale_cells,
    stale_columns,
)

_MOST_ROWS: Final = 200


def to_html(ranking: Ranking) -> str:
    """Return one self-contained page.

    Raises:
        PlanError: nothing fits, so that there is no step to draw.
    """
    best = ranking.best
    if best is None or ranking.timeline is None:
        raise PlanError("\n".join(choice(ranking)))
    rows = tuple(
        tuple(cells(outcome, ranking))
        for outcome in islice(ranking.fitting, _MOST_ROWS)
    )
    return html.to_html(
        [("the best, one step, predicted", ranking.timeline)],
        f"Plan for {ranking.model}",
        summary="; ".join(line.rstrip(".") for line in choice(ranking)) + ".",
        samples_per_step=ranking.batch_size,
        figures=(
            Figure(
                "Every candidate: samples per second over peak memory per device",
                to_svg(ranking),
            ),
        ),
        tables=(
            _memory_table(best),
            Table(f"The best {len(rows)} that fit", columns(ranking), rows),
            *_stale_tables(ranking),
        ),
        facts=(Facts("What this rests on", text="\n".join(head(ranking))),),
    )


def _stale_tables(ranking: Ranking) -> Iterator[Table]:
    """Return the table of flush-free orders, if there are any."""
    names = columns(ranking)
    rows = tuple(
        (*[*cells(outcome, ranking)][:5], *stale_cells(outcome, ranking))
        for outcome in islice(ranking.fitting, _MOST_ROWS)
        if outcome.delay
    )
    if rows:
        yield Table(
            "Of these, the ones with old weights (*)",
            (*names[:5], *stale_columns(ranking)),
            rows,
        )


def _memory_table(best: Outcome) -> Table:
    """Return the memory of each device."""
    rows = tuple(
        (
            f"d{device}",
            byte_size(split.weight_bytes),
            byte_size(split.version_bytes),
            byte_size(split.gradient_bytes),
            byte_size(split.update_bytes),
            byte_size(split.activation_bytes),
            byte_size(split.total_bytes),
            percent(split.total_bytes / best.budget_bytes),
        )
        for device, split in enumerate(best.memory)
    )
    names = (
        "device",
        "weights",
        "older versions",
        "gradients",
        "optimizer",
        "activations",
        "together",
        "of the memory",
    )
    return Table(
        f"Memory of the best, at {short(best.samples_per_s)} samples/s", names, rows
    )
