"""The tables of this benchmark's README."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.ooo_data.experiments import simulated
from bench.ooo_data.experiments import table as simulated_table

Row = dict[str, Any]


def measured(rows: list[Row]) -> list[list[str]]:
    """Medians of each contestant, at each rate of the link."""
    head = ["r", "computing", "DDP", "DDP, best buckets", "k = 0, barrier", "k = 0"]
    more = ["k found", "best k", "over DDP", "over its best", "simulated"]
    return [[*head, *more], *map(_measured_row, rows)]


def _measured_row(row: Row) -> list[str]:
    best_ddp = _fastest(row, lambda name: name.startswith("DDP"))
    best_k = _fastest(row, lambda name: name == "found" or name.startswith("k = "))
    found_ms = _median(row, "found")
    error = row["contestants"]["found"]["predicted_ms"] / found_ms - 1
    chosen = f"{row['k']} of {row['num_buckets']}"
    best_name = chosen if best_k == "found" else best_k.removeprefix("k = ")
    return [
        f"{row['r']:g} ({row['r_measured']:.2f})",
        f"{row['compute_ms']:.0f} ms",
        _cell(row, "DDP"),
        f"{_cell(row, best_ddp)} ({best_ddp.removeprefix('DDP, ')})",
        _cell(row, "k = 0, barrier"),
        _cell(row, "k = 0"),
        f"{_cell(row, 'found')} ({chosen})",
        f"{_median(row, best_k):.0f} ms ({best_name})",
        f"**{_median(row, 'DDP') / found_ms:.2f}**",
        f"**{_median(row, best_ddp) / found_ms:.2f}**",
        f"{100 * error:+.1f} %",
    ]


def hosts(_rows: list[Row]) -> list[list[str]]:
    """The paper's experiments, simulated again."""
    return simulated_table([*simulated()])


def _fastest(row: Row, is_meant: Callable[[str], bool]) -> str:
    names = [name for name in row["contestants"] if is_meant(name)]
    return min(names, key=lambda name: _median(row, name))


def _median(row: Row, name: str) -> float:
    return float(row["contestants"][name]["median_ms"])


def _cell(row: Row, name: str) -> str:
    spread = row["contestants"][name]
    low, high = spread["quartile_1_ms"], spread["quartile_3_ms"]
    return f"{spread['median_ms']:.0f} ms ({low:.0f} to {high:.0f})"
