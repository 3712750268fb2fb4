"""The table of the README."""

from __future__ import annotations

from typing import Any

HEAD = [
    "microbatches of each worker",
    "step",
    "step of FSDP2",
    "ratio",
    "predicted",
    "memory",
    "memory of FSDP2",
    "ratio",
]


def beside_fsdp(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Steps and memory of both, and the prediction of ours."""
    table = [HEAD]
    for row in rows:
        ours, theirs = row["hocket"]["median_ms"], row["FSDP2"]["median_ms"]
        here, there = row["hocket_peak_mb"], row["FSDP2_peak_mb"]
        table.append(
            [
                str(row["num_microbatches"]),
                f"{ours:,.0f} ms",
                f"{theirs:,.0f} ms",
                f"**{row['ratio']:.2f}**",
                f"{row['predicted_ms']:,.0f} ms ({row['prediction_error']:+.0%})",
                f"{here:,.0f} MB",
                f"{there:,.0f} MB",
                f"**{here / there:.2f}**",
            ]
        )
    return table


def layouts(rows: list[dict[str, Any]]) -> list[list[str]]:
    """What each layout of four workers sends and holds, and how exact it is."""
    head = ["layout", "messages", "gathers", "reductions", "peak memory"]
    table = [[*head, "difference in float64"]]
    for row in rows:
        sent = [row[f"{x}_mb"] for x in ("messages", "gathers", "reductions")]
        table.append(
            [
                f"`{row['layout']}`",
                *(f"{x:,.1f} MB" if x else "-" for x in sent),
                f"{row['peak_mb']:,.0f} MB",
                f"{row['difference']:.0e}",
            ]
        )
    return table
