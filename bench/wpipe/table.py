"""The table of this benchmark's README."""

from __future__ import annotations

from typing import Any


def beside_2bw(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each contestant beside PipeDream-2BW."""
    head = ["schedule", "layout", "step", "times as fast as 2BW", "simulated", "ideal"]
    table = [[*head, "with fill and drain", "old weights", "last loss", "accuracy"]]
    for row in rows:
        ratio = row["times_as_fast"]
        table.append(
            [
                f"`{row['schedule']}`",
                row["layout"],
                f"{row['step']['median_ms']:.0f} ms",
                f"**{ratio['of_medians']:.2f}** ({ratio['quartile_1']:.2f} to "
                f"{ratio['quartile_3']:.2f})",
                f"{row['simulated_times_as_fast']:.2f}",
                f"{row['ideal_times_as_fast']:.2f}",
                f"{row['round_step']['median_ms']:.0f} ms",
                f"{row['old_bytes'] / 2**20:.1f} MiB",
                f"{row['last_loss']:.4f}",
                f"{100 * row['accuracy']:.1f} %",
            ]
        )
    return table


def in_blocks(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Microbatches held at most, and time, beside one block and beside 2BW."""
    head = ["schedule", "devices", "microbatches", "message", "held", "in one block"]
    table = [[*head, "2BW", "steady bubble", "in one block", "run / in one block"]]
    for row in rows:
        blocks, one, two_bw = row["blocks"], row["one block"], row["2bw"]
        table.append(
            [
                f"`{row['schedule']}`",
                str(row["num_devices"]),
                str(row["num_microbatches"]),
                f"{row['message_s']:g} F",
                f"**{blocks['most_held']:g}**",
                f"{one['most_held']:g}",
                f"{two_bw['most_held']:g}",
                f"{blocks['steady_bubble']:.3f}",
                f"{one['steady_bubble']:.3f}",
                f"{blocks['makespan_s'] / one['makespan_s']:.4f}",
            ]
        )
    return table
