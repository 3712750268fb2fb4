"""The table of this benchmark's README."""

from __future__ import annotations

from typing import Any


def beside_other(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each row: both checkouts' times, their ratio in each round, and in each start."""
    head = "model", "schedule", "steps", "this", "other", "this / other", "quartiles"
    table = [[*head, "starts"]]
    for row in rows:
        ratio = row["ratio"]
        table.append(
            [
                row["model"],
                f"`{row['schedule']}`",
                str(row["num_steps"]),
                f"{row['this']['median_ms']:.0f} ms",
                f"{row['other']['median_ms']:.0f} ms",
                f"**{ratio['median_of_rounds']:.3f}**",
                f"{ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f}",
                f"{row['ratio_of_starts'][0]:.3f} to {row['ratio_of_starts'][-1]:.3f}",
            ]
        )
    return table
