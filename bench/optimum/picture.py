"""The distances as one picture: a row per schedule, a point per case."""

from __future__ import annotations

from io import StringIO
from statistics import median
from typing import Any, Final

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.figures import for_both_themes

# Two of Okabe and Ito's colours, which every eye distinguishes.
COLOURS: Final = {"equal": "#0072B2", "measured": "#D55E00"}
_APART: Final = 0.18  # of a row, above and below its middle


def distances_svg(rows: list[dict[str, Any]]) -> str:
    """Points, and a bar at each median; the best schedules at the top.

    Args:
        rows: of the benchmark.
    """
    names = sorted(
        {row["schedule"] for row in rows},
        key=lambda name: -median(x["gap"] for x in rows if x["schedule"] == name),
    )
    figure = Figure(figsize=(8.0, 1.2 + 0.36 * len(names)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for number, (times, colour) in enumerate(COLOURS.items()):
        own = [row for row in rows if row["times"] == times]
        shift = _APART * (1 - 2 * number)
        axes.scatter(
            [100 * row["gap"] for row in own],
            [names.index(row["schedule"]) + shift for row in own],
            s=9,
            color=colour,
            alpha=0.6,
            linewidths=0,
            label=f"{times} times",
        )
        for place, name in enumerate(names):
            gaps = [100 * row["gap"] for row in own if row["schedule"] == name]
            if gaps:
                middle = place + shift
                axes.plot(
                    [median(gaps)] * 2, [middle - 0.16, middle + 0.16], color=colour
                )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=-0.5)  # points at 0 are whole
    axes.set_xlabel("longer than the bound, %")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    page = StringIO()
    figure.savefig(page, format="svg", metadata={"Date": None})
    return for_both_themes(page.getvalue())
