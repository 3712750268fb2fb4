"""The table of this benchmark's README."""

from __future__ import annotations

from typing import Any

_WORDS = {"export": "captured", "sequential": "modules"}


def halves(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each way beside the whole backward."""
    table = [["model", "as", "whole", "layers / whole", "target", "graph", "torch"]]
    for row in rows:
        ratios = {
            way: row[f"{way}_over_whole"]["of_medians"]
            for way in ("layers", "graph", "torch")
        }
        table.append(
            [
                row["case"],
                _WORDS[row["how"]],
                f"{row['whole']['median_ms']:.2f} ms",
                f"**{ratios['layers']:.3f}**",
                f"{row['target']:.2f}",
                f"{ratios['graph']:.2f}",
                f"{ratios['torch']:.2f}",
            ]
        )
    return table
