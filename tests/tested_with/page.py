"""Writes two pages of docs/reference: `python -m tests.tested_with.page`.

They are tested-with.md, and seen-and-refused.md (`seen_page.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.run.engine import test_exactness, test_exactness_long, test_training
from tests.run.support.comparison import NUM_STEPS
from tests.run.support.optimizers import OPTIMIZERS as MADE
from tests.tested_with import seen_page
from tests.tested_with.count import keys, named, num_cases
from tests.tested_with.rows import FAULTS, LOSSES, OPTIMIZERS, Row
from tests.zoo.catalogue.table import Outcome, outcome_of, results
from tests.zoo.test_zoo import ALL, ORDERS

PAGE: Final = Path(__file__).parents[2] / "docs/reference/tested-with.md"
_HEAD: Final = """# Tested with

Counted from the tests' own tables by `tests/tested_with/page.py`, which writes this
page. A case is one set of a test's parameters, or one example that it draws at random.
"""


def page() -> str:
    """Return the page in Markdown."""
    parts = [_HEAD, _architectures(), _section("Losses", LOSSES), _optimizers()]
    return "\n".join([*parts, _section("Faults", FAULTS)])


def _architectures() -> str:
    found = results()
    libraries = list(dict.fromkeys(row["library"] for row in found))
    counts = Counter((row["library"], outcome_of(row)) for row in found)
    lines = [
        (library, *(counts[library, outcome] for outcome in Outcome))
        for library in libraries
    ]
    totals = ("all", *(sum(column) for column in list(zip(*lines, strict=True))[1:]))
    stages = ", ".join(map(str, sorted(ORDERS)))
    return (
        f"## Architectures\n\n{len(found)} were captured, cut into one to three stages "
        "and compared with the uncut\nmodel in float64 ([each of them]"
        "(architectures.md), `tests/zoo/test_catalogue.py`):\n\n"
        f"{_table(('from', *Outcome), [*lines, totals])}\n"
        f"{len(ALL)} train for {NUM_STEPS} steps in {stages} stages on two workers, "
        "and equal the plain loop\n(`tests/zoo/test_zoo.py`):\n"
        f"{', '.join(ALL)}.\n"
    )


def _optimizers() -> str:
    """The section, with the runs that tests list instead of parameters."""
    every = (test_exactness, test_exactness_long, test_training)
    runs: list[dict[str, Any]] = [
        run for module in every for jobs in module.JOBS.values() for run in jobs
    ]
    used = Counter(str(run.get("optimizer", "adamw")) for run in runs)
    what = "Pipelines on one to eight workers: equal to the plain loop"
    names = ", ".join(f"{name} ({used[name]})" for name in MADE if used[name])
    files = ", ".join(f"`{module.__name__.replace('.', '/')}.py`" for module in every)
    return _section("Optimizers", OPTIMIZERS, [(what, names, len(runs), files)])


def _section(
    title: str, rows: Iterable[Row], first: Iterable[Sequence[object]] = ()
) -> str:
    has_names = any(row.table for row in rows)
    head = ("what", *(("which",) if has_names else ()), "cases", "test")
    lines = [*first, *(_line(row, has_names) for row in rows)]
    return f"## {title}\n\n{_table(head, lines)}"


def _line(row: Row, has_names: bool) -> Iterator[object]:
    yield row.what
    if has_names:
        yield ", ".join(keys(f"{row.file}::{row.table}")) if row.table else "-"
    yield sum(num_cases(f"{row.file}::{test}") for test in row.tests) * _times(row)
    yield f"`{row.file}`"


def _times(row: Row) -> int:
    found = named(f"{row.file}::{row.times}") if row.times else 1
    return found if isinstance(found, int) else len(found)


def _table(head: Sequence[object], lines: Iterable[Iterable[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
    seen_page.PAGE.write_text(seen_page.seen_page())
