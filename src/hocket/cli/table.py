"""Tables on the command line: aligned columns of text."""

from __future__ import annotations

from collections.abc import Iterable


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
