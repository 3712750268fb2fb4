"""What commands print and write: aligned tables, and the files that users name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Format rows as lines: the first column to the left, the others to the right.

    >>> aligned([("lane", "bubble"), ("d10", "9 %")])
    ['lane  bubble', 'd10      9 %']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def write_output(path: Path, contents: str | bytes) -> int:
    """Write a file; return its bytes.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    data = contents.encode() if isinstance(contents, str) else contents
    try:
        return path.write_bytes(data)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        raise typer.BadParameter(reason) from None
