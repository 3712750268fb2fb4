"""The table of bench/start_memory/README.md."""

from __future__ import annotations

from typing import Any


def starts(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each worker beside one that has made and loaded the whole model."""
    head = ["workers", "rank", "its weights", "allowed", "from files", "made whole"]
    table = [[*head, "start from files", "made whole", "ratio"]]
    of = {(x["how"], x["workers"], x["rank"], x["round"]): x for x in rows}
    for (how, workers, rank, number), row in of.items():
        if how != "meta":
            continue
        whole = of["whole", workers, rank, number]
        table.append(
            [
                str(workers),
                str(rank),
                f"{row['share_mb']:,.0f} MB",
                f"{row['allowed_mb']:,.0f} MB",
                f"**{row['peak_mb']:,.0f} MB**",
                f"{whole['peak_mb']:,.0f} MB",
                f"{row['seconds']:.0f} s",
                f"{whole['seconds']:.0f} s",
                f"**{row['seconds'] / whole['seconds']:.2f}**",
            ]
        )
    return table
