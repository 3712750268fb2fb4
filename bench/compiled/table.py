"""The table of this benchmark's README."""

from __future__ import annotations

from typing import Any


def beside_eager(rows: list[dict[str, Any]]) -> list[list[str]]:
    """B, and I + W, compiled beside eager."""
    head = ["model", "F + B", "compiled", "ratio", "F + I + W", "compiled", "ratio"]
    table = [[*head, "target", "compiling"]]
    for row in rows:
        line = [row["case"]]
        for way in ("whole", "split"):
            line += [f"{row[f'{kind} {way}']['median_ms']:.2f} ms" for kind in _KINDS]
            line.append(f"**{row[way]['of_medians']:.3f}**")
        table.append([*line, f"{row['target']:.2f}", f"{row['compiling_s']:.0f} s"])
    return table


_KINDS = ("eager", "compiled")
