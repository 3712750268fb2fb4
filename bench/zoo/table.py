"""The two tables of the README: speed and memory, and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

Rows = list[dict[str, Any]]


def speed_and_memory(rows: Rows) -> list[list[str]]:
    """Samples per second, and MiB of the worker that holds more."""
    head = ["model", "plain", "DDP", "`1f1b`", "chosen by `plan`", "chosen / plain"]
    units = ["plain", "DDP", "`1f1b`", "chosen"]
    table = [[*head, "chosen / DDP", *(f"{unit}, MiB" for unit in units)]]
    for row in rows:
        if "failed" in row:
            table.append([row["architecture"], row["failed"], *[""] * 9])
            continue
        found, chosen = row["contestants"], row["chosen"]
        of = [found.get(label) for label in ("plain", "ddp", "1f1b", chosen)]
        speeds = [f"{one['samples_per_s']:,.0f}" if one else "-" for one in of]
        speeds[3] += f", `{chosen}`" if chosen != "1f1b" else ""
        ratios = [
            f"**{of[3]['samples_per_s'] / one['samples_per_s']:.2f}**" if one else "-"
            for one in of[:2]
        ]
        sizes = [f"{max(x['peak_bytes']) / 2**20:.1f}" if x else "-" for x in of]
        table.append([row["architecture"], *speeds, *ratios, *sizes])
    return table


def predictions(rows: Rows) -> list[list[str]]:
    """Of each pipeline, what it predicted of itself and what `plan` did; of DDP too."""
    head = ["model", "order", "measured", "predicted", "error", "each profile"]
    table = [[*head, "error of its ops", "bubble predicted / measured", "`plan`"]]
    table += [
        [name, f"`{label}`", f"{found['median_ms']:.1f} ms", *_forecast(found)]
        for name, label, found in _forecasts(rows)
    ]
    errors = [abs(x["error"]) for _, _, x in _forecasts(rows) if "error" in x]
    of_plan = [
        abs(x["planned_error"]) for _, _, x in _forecasts(rows) if "planned_error" in x
    ]
    ends = ["median, worst", "", "", "", _ends(errors), "", "", "", _ends(of_plan)]
    return [*table, ends]


def _forecasts(rows: Rows) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of what anything was predicted."""
    for row in rows:
        for label, found in row.get("contestants", {}).items():
            if "error" in found or "planned_error" in found:
                yield row["architecture"], label, found


def _forecast(found: dict[str, Any]) -> list[str]:
    planned = _percent(found["planned_error"]) if "planned_error" in found else "-"
    if "error" not in found:
        return [*["-"] * 5, planned]
    return [
        f"{found['predicted_ms']:.1f} ms",
        f"**{_percent(found['error'])}**",
        f"{', '.join(f'{error * 100:+.0f}' for error in found['errors'])} %",
        _percent(found["makespan_error"]),
        f"{found['bubble_predicted']:.3f} / {found['bubble_measured']:.3f}",
        planned,
    ]


def _percent(error: float) -> str:
    return f"{error * 100:+.1f} %"


def _ends(errors: list[float]) -> str:
    if not errors:
        return "-"
    return f"**{median(errors) * 100:.1f} %, {max(errors) * 100:.1f} %**"
