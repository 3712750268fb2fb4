"""Results that are measured in parts: rounds or seeds, one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def rows_of(path: Path) -> dict[str, Row]:
    """Return what was measured before, by case."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["case"]: row for row in rows}


def joined(found: Row, before: Row | None, lists: str, first: int) -> Row:
    """Return a row whose lists continue those of an earlier part.

    Args:
        found: the part that was measured now.
        before: the earlier parts; None: there are none.
        lists: the entry with a list for each contestant, one run after the other.
        first: the place of the first run that was measured now.
    """
    earlier = {} if before is None else before[lists]
    runs = {x: earlier.get(x, [])[:first] + own for x, own in found[lists].items()}
    return {**found, lists: runs}
