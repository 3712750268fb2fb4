"""Writes the page of architectures from the lines that `check.py` has written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

_HEAD: Final = """# Architectures

Each was captured in training and in evaluation, cut into one, two and three stages by
number of layers, trained on microbatches of 4, 4, 3 and 1 or 2 samples, and evaluated,
in float64. The difference is the largest of any output, gradient or buffer from the
uncut model's, relative to its size. No capture changed its model. Written by
`tests/zoo/catalogue/table.py`; `make test-long` repeats it.

{equal} of {all} are equal; {exact} of them bit for bit.

| architecture | from | layers | modules run as they are | difference |
|---|---|---|---|---|
"""
EQUAL: Final = 1e-12


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the page in Markdown."""
    found = list(rows)
    equal = [row for row in found if _is_equal(row)]
    exact = sum(row["difference"] == 0.0 for row in equal)
    head = _HEAD.format(equal=len(equal), all=len(found), exact=exact)
    return head + "".join(f"{_line(row)}\n" for row in found)


def _is_equal(row: Mapping[str, Any]) -> bool:
    return not row["refused"] and not row["changed"] and row["difference"] <= EQUAL


def _line(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return f"| {row['name']} | {row['library']} | - | - | {row['refused']} |"
    difference = f"{row['difference']:.0e}" if row["difference"] else "0"
    cells = (row["name"], row["library"], row["num_layers"], row["as_is"] or "-")
    return f"| {' | '.join(map(str, cells))} | {difference} |"


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    sys.stdout.write(page(map(json.loads, lines)))
