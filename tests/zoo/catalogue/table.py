"""Writes the page of architectures from what `check.py` has found.

python -m tests.zoo.catalogue.check > tests/zoo/catalogue/results.jsonl
python -m tests.zoo.catalogue.table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).with_name("results.jsonl")
PAGE: Final = Path(__file__).parents[3] / "docs/reference/architectures.md"
EQUAL: Final = 1e-12  # relative, in float64: several stages add to one gradient
_HEAD: Final = """# Architectures

Each was captured in training and in evaluation, cut into one, two and three stages by
number of layers, trained on microbatches of 4, 4, 3 and 1 or 2 samples, and evaluated,
in float64. The difference is the largest of any output, gradient or buffer from the
uncut model's, relative to its size. No capture changed its model. Written by
`tests/zoo/catalogue/table.py`; `make test-long` repeats it.

Of {all}, {equal} are equal, {exact} of them bit for bit; {refused}.

| architecture | from | layers | modules run as they are | difference |
|---|---|---|---|---|
"""


class Outcome(StrEnum):
    """What came of an architecture."""

    EXACT = "equal, bit for bit"
    EQUAL = "equal to 1e-12"
    REFUSED = "refused, with a way out"
    OTHER = "something else"


def results() -> list[dict[str, Any]]:
    """Return what was found, as it is kept."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """Return what came of an architecture."""
    if row["refused"]:
        return Outcome.REFUSED
    if row["changed"] or row["difference"] > EQUAL:
        return Outcome.OTHER
    return Outcome.EQUAL if row["difference"] else Outcome.EXACT


def page() -> str:
    """Return the page in Markdown."""
    found = results()
    counts = Counter(map(outcome_of, found))
    head = _HEAD.format(
        all=len(found),
        equal=counts[Outcome.EQUAL] + counts[Outcome.EXACT],
        exact=counts[Outcome.EXACT],
        refused=f"{counts[Outcome.REFUSED]} is refused, as it should be",
    )
    return head + "".join(f"{_line(row)}\n" for row in found)


def _line(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return f"| {row['name']} | {row['library']} | - | - | {row['refused']} |"
    difference = f"{row['difference']:.0e}" if row["difference"] else "0"
    cells = (row["name"], row["library"], row["num_layers"], row["as_is"] or "-")
    return f"| {' | '.join(map(str, cells))} | {difference} |"


if __name__ == "__main__":
    PAGE.write_text(page())
