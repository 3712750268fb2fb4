"""The table of `bench.gpu.all`: what was seen, the target, and whether it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from bench.gpu.freezing import SHAPES as FREEZING
from bench.gpu.ooo_single import NETS
from bench.gpu.share import CONTESTANTS, PAIRS
from bench.gpu.speed import CASES

Row = Mapping[str, Any]
Seen = tuple[str, bool | None]  # the text, and whether the target holds, if known
COLUMNS: Final = ("what", "seen", "target", "beside", "holds")
NEAR: Final = 0.03  # of a prediction
NOISE: Final = 0.99  # a speed that is not lower than another


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table.

    Args:
        what: was measured.
        target: in words.
        beside: what it is compared with.
        parts: the names of parts with one row each, which it needs.
        see: what their rows say.
    """

    what: str
    target: str
    beside: str
    parts: tuple[str, ...]
    see: Callable[[Sequence[Row]], Seen]

    def row(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Its cells, from what all parts found."""
        cells = {"what": self.what, "target": self.target, "beside": self.beside}
        missing = {_why_not(found.get(name)): name for name in self.parts[::-1]}
        missing.pop("", None)
        if missing:
            why = "; ".join(f"{name}: {why}" for why, name in missing.items())
            return {**cells, "seen": "not measured", "holds": why}
        rows = [next(iter(found[name]["rows"].values())) for name in self.parts]
        seen, holds = self.see(rows)
        return {**cells, "seen": seen, "holds": holds}


def _why_not(part: Any) -> str:
    """Why a part has no row to look at; nothing if it has one."""
    if part is None:
        return "not asked for"
    if not part["holds"]:
        return str(part.get("error") or part["not measured"])
    return str(next(iter(part["rows"].values())).get("skipped", ""))


def kept(
    parts: Mapping[str, Any], lines: Sequence[Line], card: str
) -> dict[str, dict[str, Any]]:
    """The parts of an earlier run that need not run again.

    They hold, and none was skipped. A line is a comparison on one card: where some of
    its parts run again on another one, all do.

    Args:
        parts: by name.
        lines: of the table.
        card: on which the others will run.
    """
    good = {
        name: part
        for name, part in parts.items()
        if part["holds"] and not any("skipped" in x for x in part["rows"].values())
    }
    for line in lines:
        if any(name not in good for name in line.parts):
            for name in line.parts:
                if name in good and good[name]["card"] != card:
                    del good[name]
    return good


def printed(rows: Sequence[Row]) -> str:
    """The table as text."""
    words = {True: "yes", False: "no", None: "not known"}
    cells = [list(COLUMNS)]
    for row in rows:
        holds = words.get(row["holds"], str(row["holds"]))
        cells.append([*(str(row[x]) for x in COLUMNS[:-1]), holds])
    widths = [max(len(one[i]) for one in cells) for i in range(len(COLUMNS) - 1)]
    return "\n".join(
        "  ".join([*(x.ljust(n) for x, n in zip(one, widths, strict=False)), one[-1]])
        for one in cells
    )


def _at_most(path: Sequence[str], most: float, rows: Sequence[Row]) -> Seen:
    value: Any = rows[0]
    for key in path:
        value = value[key]
    return f"{value:.3f}", value <= most


def _near_one(key: str, rows: Sequence[Row]) -> Seen:
    value = rows[0][key]
    if value is None:
        return "not known on a CPU", None
    return f"{value:.3f}", abs(value - 1) <= NEAR


def _times_as_fast(least: float, rows: Sequence[Row]) -> Seen:
    """The last row beside the fastest of the others."""
    *others, own = (row["step"]["median_ms"] for row in rows)
    return f"{min(others) / own:.3f}", min(others) / own >= least


def _pair(rows: Sequence[Row]) -> Seen:
    """`auto` and the best of all, beside turns and two processes."""
    speeds = {row["contestant"]: row["sum_of_speeds"] for row in rows}
    text = ", ".join(f"{name} {value:.2f}" for name, value in speeds.items())
    best = max(value for name, value in speeds.items() if name != "two processes")
    return text, best >= 1.35 and speeds["auto"] >= NOISE * speeds["turns"]


def _near_lines(what: str, key: str, beside: str) -> list[Line]:
    return [
        Line(
            f"{what}: {name}",
            "within 3 %",
            beside,
            (f"one worker, {name}",),
            partial(_near_one, key),
        )
        for name in CASES
    ]


LINES: Final = (
    *(
        Line(
            f"one worker, 1f1b: {name}",
            f"<= {most} of its time",
            "plain loop",
            (f"one worker, {name}",),
            partial(_at_most, ("hocket_over_plain", "of_medians"), most),
        )
        for name, most in CASES.items()
    ),
    *_near_lines("predicted time", "predicted_over_measured", "measured"),
    *(
        Line(
            f"compile_step: {net}",
            ">= 1.05, never < 0.99",
            "faster graph of eager, compiled",
            tuple(f"{net}, {x}" for x in ("graph", "graph of compile", "hocket")),
            partial(_times_as_fast, 1.05),
        )
        for net in NETS
    ),
    *(
        Line(
            f"two jobs: {'+'.join(pair)}",
            "best >= 1.35, auto >= turns",
            "turns; two processes",
            tuple(f"{'+'.join(pair)}, {x}" for x in CONTESTANTS),
            _pair,
        )
        for pair in PAIRS
    ),
    *(
        Line(
            f"memory of two jobs above weights: {'+'.join(pair)}",
            "<= 0.63 of both",
            "separate",
            (f"{'+'.join(pair)}, auto",),
            partial(_at_most, ("above_static_over_separate",), 0.63),
        )
        for pair in PAIRS
    ),
    *(
        Line(
            f"Waves: {sync}",
            ">= 1.1, never < 0.99",
            "plain loop",
            ("waves, plain", f"waves, {sync}"),
            partial(_times_as_fast, 1.1),
        )
        for sync in ("exact", "wave")
    ),
    *(
        Line(
            f"freezing on one GPU: {shape}, half{also}",
            f">= {least}",
            "no freezing",
            (f"freezing {shape}, none", f"freezing {shape}, half{also}"),
            partial(_times_as_fast, least),
        )
        for shape in FREEZING
        for also, least in (("", 1.4), (" and cache", 2.0))
    ),
    Line(
        "teacher in a second lane",
        ">= 1.1",
        "faster of one lane, plain loop",
        ("teacher, plain loop", "teacher, one lane", "teacher, second lane"),
        partial(_times_as_fast, 1.1),
    ),
    *_near_lines("predicted peak", "predicted_over_peak", "max_memory_allocated"),
)
