"""The tables of bench/scale/README.md."""

from __future__ import annotations

from typing import Any

# Of each column, the numbers of a row that it shows.
_COLUMNS = {
    "groups": "groups",
    "made with others": "groups_made",
    "requests until the first step": "requests",
    "in a step": "requests_of_a_step",
    "gloo's own": "requests_of_gloo",
    "handles": "handles",
    "sockets": "sockets",
    "messages": "messages",
    "collectives": "collectives",
}


def counts(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rank 0, the most of the others in its replica, and of those in other replicas."""
    table = [["workers", "start", "of", *_COLUMNS]]
    for num_workers in sorted({row["workers"] for row in rows}):
        own = [row for row in rows if row["workers"] == num_workers]
        start_s = max(row["start_s"] for row in own)
        parts = {"rank 0": own[:1], "its pipeline": own[1:4], "other replicas": own[4:]}
        for name, some in parts.items():
            if some:
                most = [f"{max(x[key] for x in some):g}" for key in _COLUMNS.values()]
                table.append([str(num_workers), f"{start_s:.0f} s", name, *most])
    return table


def commands(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Seconds of each command beside what is aimed at."""
    table = [["command", "seconds", "of CPU time", "target"]]
    for row in rows:
        seconds, target_s = row["median_s"], row["target_s"]
        shown = f"{seconds:.1f} s" if seconds > target_s else f"**{seconds:.1f} s**"
        cpu = f"{row['median_cpu_s']:.1f} s"
        table.append([f"`{row['command']}`", shown, cpu, f"{target_s:.0f} s"])
    return table
