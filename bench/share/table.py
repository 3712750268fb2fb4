"""The tables of the README, from the results that are kept."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]


def cost_of_turns(rows: Rows) -> list[list[str]]:
    """Turns beside one loop in one thread."""
    table = [["jobs", "one loop", "turns", "turns / loop", "quartiles"]]
    for row in rows:
        if row["part"] == "turns":
            ratio = row["cpu_turns_over_plain"]
            table.append(
                [
                    ", ".join(row["jobs"]),
                    f"{row['plain']['median_ms']:.1f} ms",
                    f"{row['turns']['median_ms']:.1f} ms",
                    f"**{ratio['median_of_rounds']:.3f}**",
                    f"{ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f}",
                ]
            )
    return table


def cost_of_a_gate(rows: Rows) -> list[list[str]]:
    """An iteration that does nothing."""
    table = [["an empty iteration in turns", "of it CPU time"]]
    table += [
        [f"{row['gate_us']:.0f} µs", f"**{row['gate_cpu_us']:.0f} µs**"]
        for row in rows
        if row["part"] == "gate"
    ]
    return table


def forecasts(rows: Rows) -> list[list[str]]:
    """Forecast beside measured bytes; durations beside those of the next iteration."""
    table = [["model", "forecast", "measured", "error", "error of seconds"]]
    table += [
        [
            row["model"],
            f"{row['forecast_bytes'] / 2**20:.2f} MiB",
            f"{row['measured_bytes'] / 2**20:.2f} MiB",
            f"**{abs(row['error']) * 100:.1f} %**",
            f"{row['error_of_seconds'] * 100:.1f} %",
        ]
        for row in rows
        if row["part"] == "forecast"
    ]
    return table


def predictions(rows: Rows) -> list[list[str]]:
    """The predicted beside the measured sum of speeds."""
    table = [["pair", "mode", "predicted", "measured", "error", "peak / budget"]]
    table += [
        [
            row["pair"],
            f"`{row['mode']}`",
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            f"**{row['error'] * 100:+.1f} %**",
            f"{row['peak_over_budget']:.2f}",
        ]
        for row in rows
        if row["part"] == "merged"
    ]
    return table
