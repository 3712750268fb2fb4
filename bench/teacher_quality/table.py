"""The table of this benchmark's README: final quality of students."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

from bench.staleness.spread import Numbers, spread_of
from bench.teacher_quality.variants import BYOL, DISTILLED

Row = dict[str, Any]

_TITLES: Final = {
    **{name: variant.title for name, variant in BYOL.items()},
    "teacher": "teacher",
    **{name: variant.title for name, variant in DISTILLED.items()},
}
_RIVALS: Final = {
    "delay 1": "delay 0",
    "both stale": "delay 0",
    "taught": "alone",
}


def qualities(rows: list[Row]) -> list[list[str]]:
    """Each variant of each case: the mean over seeds ± the deviation of one."""
    head = ["case", "variant", "parameters", "steps", "accuracy, %", "by seed"]
    table = [[*head, "minus rival, by seed", "loss"]]
    for case, variant in dict.fromkeys((x["case"], x["variant"]) for x in rows):
        own = _runs(rows, case, variant)
        found = spread_of([100 * x["value"] for x in own])
        losses: Numbers = [x["loss"] for x in own]
        last = fmean(x for x in losses if x is not None) if all(losses) else None
        table.append(
            [
                case,
                _TITLES[variant],
                f"{own[0]['num_parameters']:,}",
                f"{own[0]['num_steps']}",
                f"**{found.mean:.1f} ± {found.deviation:.1f}**",
                ", ".join(f"{100 * x['value']:.1f}" for x in own),
                _differences(rows, case, variant),
                "–" if last is None else f"{last:.3f}",
            ]
        )
    return table


def _differences(rows: list[Row], case: str, variant: str) -> str:
    """Return points of accuracy above another variant from the same seed."""
    rival = _RIVALS.get(variant)
    if rival is None:
        return "–"
    others = {x["seed"]: x["value"] for x in _runs(rows, case, rival)}
    pairs = [(x["value"], others[x["seed"]]) for x in _runs(rows, case, variant)]
    return ", ".join(f"{100 * (a - b):+.1f}" for a, b in pairs)


def _runs(rows: list[Row], case: str, variant: str) -> list[Row]:
    found = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
    return sorted(found, key=lambda row: row["seed"])
