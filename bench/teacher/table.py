"""What was measured of teachers and students, as tables."""

from __future__ import annotations

from typing import Any

_MIB = 2**20


def contestants(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Every contestant of every case."""
    head = ["case", "contestant", "samples/s", "step", "quartiles", "step / bound"]
    table = [[*head, "times MP", "times GPipe", "bubble", "adds at most"]]
    for row in rows:
        step = row["step"]
        table.append(
            [
                row["case"],
                row["contestant"],
                f"{row['samples_per_s']:.1f}",
                f"{step['median_ms']:.0f} ms",
                f"{step['quartile_1_ms']:.0f} to {step['quartile_3_ms']:.0f}",
                f"**{row['step_over_bound']['of_medians']:.3f}**",
                f"{row['over_naive']['of_medians']:.2f}",
                f"{row['over_gpipe']['of_medians']:.2f}",
                f"{row['bubble']:.3f}" if "bubble" in row else "–",
                _mib(row),
            ]
        )
    return table


def emulated(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Filled orders on emulated devices: measured beside predicted."""
    head = ["devices", "schedule", "step", "quartiles", "predicted", "error"]
    table = [[*head, "step / work", "formula", "bubble predicted / measured"]]
    for row in rows:
        step, bubble = row["step"], row["bubble"]
        table.append(
            [
                str(row["num_devices"]),
                f"`{row['schedule']}`",
                f"{step['median_ms']:.1f} ms",
                f"{step['quartile_1_ms']:.1f} to {step['quartile_3_ms']:.1f}",
                f"{row['predicted_ms']:.1f} ms",
                f"**{row['error'] * 100:+.1f} %**",
                f"{step['median_ms'] / row['work_ms']:.3f}",
                f"{row['formula_ms']:.0f} ms" if row["schedule"] == "gpipe" else "–",
                f"{bubble['predicted']:.3f} / {bubble['measured']:.3f}",
            ]
        )
    return table


def measured_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The same for a terminal, without spread."""
    table = [["case", "contestant", "samples/s", "over bound", "MP", "GPipe", "bubble"]]
    table += [
        [
            row["case"],
            row["contestant"],
            f"{row['samples_per_s']:.1f}",
            f"{row['step_over_bound']['of_medians']:.2f}",
            f"{row['over_naive']['of_medians']:.2f}",
            f"{row['over_gpipe']['of_medians']:.2f}",
            f"{row['bubble']:.2f}" if "bubble" in row else "-",
        ]
        for row in rows
    ]
    return table


def _mib(row: dict[str, Any]) -> str:
    if "peak_bytes" not in row:
        return "–"
    return " / ".join(f"{x / _MIB:.0f}" for x in row["peak_bytes"]) + " MiB"
