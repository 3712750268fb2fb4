"""The tables of the README."""

from __future__ import annotations

from typing import Any


def beside_published(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Tokens per second and memory of each row, predicted and published."""
    table = [
        ["GPUs", "compiled", "tokens/s/GPU", "published", "", "GiB", "published", ""]
    ]
    for number, row in enumerate(rows):
        speed, gib = row["tokens_per_s"], row["gib"]
        error = f"**{speed / row['published_tokens_per_s'] - 1:+.1%}**"
        table.append(
            [
                str(row["num_gpus"]),
                "yes" if row["is_compiled"] else "no",
                f"{speed:,.0f}",
                f"{row['published_tokens_per_s']:,}",
                error if number else "fitted",
                f"{gib:.1f}",
                f"{row['published_gib']}",
                f"**{gib / row['published_gib'] - 1:+.1%}**",
            ]
        )
    return table


def interleaved(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Interleaved over plain 1F1B, by stages on each device."""
    table = [["stages per device", "times as fast as 1F1B", "published", ""]]
    for row in rows:
        ratio, published = row["ratio"], row["published_ratio"]
        table.append(
            [
                str(row["stages_per_device"]),
                f"{ratio:.2f}",
                f"{published:.2f}",
                f"**{ratio / published - 1:+.1%}**",
            ]
        )
    return table
