"""What commands print and write: aligned tables, and the files that users name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Final

import typer

_UNLIMITED: Final = 10_000


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


def folded(rows: Iterable[Sequence[str]], width: int) -> list[str]:
    r"""Format rows as `aligned` does, as several tables if they are wider than this.

    Each begins with the first columns, as many as it takes to know the row.

    >>> print("\n".join(folded([("lane", "busy", "idle"), ("d10", "9", "91")], 10)))
    lane  busy
    d10      9
    <BLANKLINE>
    lane  idle
    d10     91
    """
    cells = [tuple(row) for row in rows]
    num_columns = len(cells[0])
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    keys = range(1, num_columns + 1)
    num_keys = next((n for n in keys if len({x[:n] for x in cells}) == len(cells)), 1)
    if sum(widths[:num_keys]) > width / 2:
        num_keys = 1
    lines: list[str] = []
    begin = num_keys
    while begin < num_columns or not lines:
        left = width + 2 - sum(widths[:num_keys])
        until = accumulate(widths[begin:])
        end = begin + max(1, sum(1 for used in until if used <= left))
        block = aligned((*x[:num_keys], *x[begin:end]) for x in cells)
        lines += ["", *block] if lines else block
        begin = end
    return lines


def num_columns() -> int:
    """Return the columns to write in: any number where COLUMNS and terminal are not."""
    return get_terminal_size((_UNLIMITED, 24)).columns


def sentence(text: str, indent: str = "") -> list[str]:
    """Return a sentence as lines that fit the terminal."""
    return wrap(
        text,
        num_columns(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def write_output(path: Path, contents: str) -> int:
    """Write a file; return its bytes.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    try:
        return path.write_bytes(contents.encode())
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        raise typer.BadParameter(reason) from None
