"""What is refused stands in the reference, each with its reason and its test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docs/reference/refused.md").read_text(encoding="utf-8")
MOST_OF_THE_ENGINE: Final = 6
TEST: Final = re.compile(r"`(tests/[\w/]+\.py)`")


def tables() -> list[list[list[str]]]:
    """Return the cells of every table's rows, without its head."""
    found: list[list[list[str]]] = []
    for block in TEXT.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("| ")]
        if lines:
            found.append([line.strip("| ").split(" | ") for line in lines[1:]])
    return found


def test_the_engine_refuses_few_combinations_each_with_a_reason_and_a_test() -> None:
    """The first table; more rows would be another list of cases."""
    rows = tables()[0]
    assert 0 < len(rows) <= MOST_OF_THE_ENGINE
    assert all(TEST.search(row[0]) for row in rows)
    assert all(len(row) == 3 and all(row) for table in tables() for row in table)


def test_the_tests_that_it_names_exist() -> None:
    """A file that was moved is named anew."""
    named = TEST.findall(TEXT)
    assert len(named) > MOST_OF_THE_ENGINE
    assert not [path for path in named if not (ROOT / path).is_file()]
