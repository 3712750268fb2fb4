"""The distances as a table: every schedule, the one with the least median first."""

from __future__ import annotations

from statistics import median
from typing import Any


def distances(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Median and worst of each kind of times."""
    kinds = [*dict.fromkeys(row["times"] for row in rows)]
    names = {row["schedule"] for row in rows}
    of_name = {name: [x for x in rows if x["schedule"] == name] for name in names}
    middle = {name: median(x["gap"] for x in own) for name, own in of_name.items()}
    head = [f"{times} times: median, worst" for times in kinds]
    table = [["schedule", *head, "cases", "proved"]]
    for name in sorted(names, key=lambda name: (middle[name], name)):
        cells = []
        for times in kinds:
            gaps = [x["gap"] for x in of_name[name] if x["times"] == times]
            cells.append(
                f"**{_share(median(gaps))}**, {_share(max(gaps))}" if gaps else ""
            )
        num_proved = sum(row["is_proved"] for row in of_name[name])
        title, _, more = name.partition(",")
        title = f"`{title}`{',' if more else ''}{more}"
        table.append([title, *cells, str(len(of_name[name])), str(num_proved)])
    return table


def _share(gap: float) -> str:
    return f"{100 * gap:.1f} %"
