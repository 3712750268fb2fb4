"""Generate published orders of work, one file each, and name them in a table.

Imports `core` only. Begin with `one_f_one_b.py`, an order, and `table.py`, which names
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hocket.schedules.entry import Entry, Shape
from hocket.schedules.table import all_schedules, make_schedule, options_of

if TYPE_CHECKING:
    SCHEDULES: Mapping[str, Entry]

__all__ = ["SCHEDULES", "Entry", "Shape", "make_schedule", "options_of"]


def __getattr__(name: str) -> object:
    """Read the table when it is first asked for: other packages have a part in it."""
    if name != "SCHEDULES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return all_schedules()
