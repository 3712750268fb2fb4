"""Results that are measured in parts: rounds or seeds, one after the other.

Runs of one round were in the same processes, in turn: they are compared with each
other, and measured again together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def rows_of(path: Path) -> dict[str, Row]:
    """Return what was measured before, by case."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["case"]: row for row in rows}


def is_measured(
    before: Row | None, lists: str, names: Iterable[str], number: int
) -> bool:
    """Return whether a round has a run of each of some contestants.

    Args:
        before: what was measured; None: nothing.
        lists: the entry with the runs of each contestant.
        names: the contestants.
        number: the round.
    """
    return before is not None and all(
        str(number) in before[lists].get(name, {}) for name in names
    )


def joined(found: Row, before: Row | None, lists: str, number: int) -> Row:
    """Return a row with one round more, or measured again.

    Args:
        found: the round that was measured now: a run of each contestant.
        before: the others; None: there are none.
        lists: the entry with the runs.
        number: the round.
    """
    others: Mapping[str, Row] = {} if before is None else before[lists]
    names = dict.fromkeys((*others, *found[lists]))
    runs: dict[str, Row] = {}
    for name in names:
        own = {n: x for n, x in others.get(name, {}).items() if n != str(number)}
        if name in found[lists]:
            own[str(number)] = found[lists][name]
        runs[name] = dict(sorted(own.items(), key=lambda x: int(x[0])))
    return {**found, lists: runs}
