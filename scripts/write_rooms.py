"""Write the table of rooms in ARCHITECTURE.md: what each folder of the library holds.

Run from anywhere: `python scripts/write_rooms.py`. A room says so itself, in the first
line of its `__init__.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LIBRARY: Final = ROOT / "src" / "hocket"
PAGE: Final = ROOT / "ARCHITECTURE.md"
BEGIN: Final = "<!-- rooms: scripts/write_rooms.py writes this table -->\n"
END: Final = "<!-- end -->\n"


def first_line(init: Path) -> str:
    """Return what a room holds, in a line.

    Args:
        init: the room's `__init__.py`.
    """
    return (ast.get_docstring(ast.parse(init.read_text())) or "").partition("\n")[0]


def table() -> str:
    """Return the table, a row for each room."""
    rooms = {
        path.parent.relative_to(LIBRARY).as_posix(): first_line(path)
        for path in sorted(LIBRARY.rglob("__init__.py"))
        if path.parent != LIBRARY
    }
    rows = [f"| `{room}/` | {holds.rstrip('.')} |" for room, holds in rooms.items()]
    return "\n".join(["| room | holds |", "|---|---|", *rows, ""])


def with_table(page: str) -> str:
    """Return a page whose table is as the rooms say."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
