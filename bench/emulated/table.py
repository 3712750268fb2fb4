"""The tables of this benchmark's README."""

from __future__ import annotations

from typing import Any


def kept(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Simulated beside emulated, and whether the order was kept."""
    head = ["workers", "schedule", "given", "simulated", "emulated", "quartiles"]
    more = ["error", "order", "bubble simulated / emulated", "cores busy"]
    table = [[*head, *more]]
    for row in rows:
        times = row["measured"]
        table.append(
            [
                str(row["num_devices"]),
                f"`{row['schedule']}`",
                f"{row['given_ms']:.0f} ms",
                f"{row['predicted_ms']:.1f} ms",
                f"{times['median_ms']:.1f} ms",
                f"{times['quartile_1_ms']:.1f} to {times['quartile_3_ms']:.1f}",
                f"**{row['error'] * 100:+.1f} %**",
                "kept" if row["in_order"] else "**not kept**",
                f"{row['bubble_predicted']:.3f} / {row['bubble_measured']:.3f}",
                f"{row['busy_cores']:.2f}",
            ]
        )
    return table


def idle(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Idle shares of full pipelines beside the formula."""
    head = ["workers", "schedule", "microbatches", "message", "formula", "simulated"]
    more = ["predicted", "emulated", "points off", "order", "cores busy"]
    table = [[*head, *more]]
    for row in rows:
        off = row["measured"] - row["formula"]
        table.append(
            [
                str(row["num_devices"]),
                f"`{row['schedule']}`" + (", clipped" if row["clips"] else ""),
                str(row["num_microbatches"]),
                f"{row['delay']:g} F",
                *(
                    f"{row[name] * 100:.1f} %"
                    for name in ("formula", "simulated", "predicted", "measured")
                ),
                f"**{off * 100:+.1f}**",
                "kept" if row["in_order"] else "**not kept**",
                f"{row['busy_cores']:.2f}",
            ]
        )
    return table
