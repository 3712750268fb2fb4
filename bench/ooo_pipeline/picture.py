"""The table as one picture: a row per experiment, times as fast as GPipe to the right.

    python -m bench.ooo_pipeline.picture

draws it again from what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.figures import BLUE, GREEN, GREY, ORANGE, for_both_themes
from hocket.planner.published.catalogue import read_results

PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "ooo-pipeline.svg"

KEPT: Final = Path(__file__).parent / "results" / "cpu.json"

_HALF: Final = 0.36  # of a row's height, that the published range takes


def speedups_svg(table: Mapping[str, Any]) -> str:
    """All experiments; and below them what was measured, order by order.

    Args:
        table: what `hocket bench ooo-pipeline --json` prints.
    """
    rows = table["experiments"]
    measured = [] if table["measured"] is None else table["measured"]["rows"]
    heights = [len(rows) + 1, *([len(measured) + 1] if measured else [])]
    with rc_context({"svg.hashsalt": "hocket"}):
        figure = Figure(figsize=(8.4, 0.36 * sum(heights) + 1.0), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(
            len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
        )[:, 0]
        _draw_simulated(panels[0], rows)
        if measured:
            _draw_measured(panels[1], measured)
        panels[-1].set_xlabel("times as fast as GPipe")
        page = StringIO()
        figure.savefig(page, format="svg", metadata={"Date": None})
    return for_both_themes(page.getvalue())


def _draw_simulated(axes: Axes, rows: list[dict[str, Any]]) -> None:
    published = [(i, row["published"]) for i, row in enumerate(rows)]
    ranges = [(i, *both) for i, both in published if both]
    axes.barh(
        [i for i, _, _ in ranges],
        [high - low for _, low, high in ranges],
        left=[low for _, low, _ in ranges],
        height=2 * _HALF,
        color=GREY,
        alpha=0.3,
        label="published, of all together",
    )
    places = np.arange(len(rows))
    limits = [row["limit"] for row in rows]
    axes.vlines(
        limits, places - _HALF, places + _HALF, "black", label="limit on GPipe's stages"
    )
    shown = (
        ("fast-forward", "fast_forward", "o", BLUE, -0.12),
        ("modulo allocation", "modulo", "D", ORANGE, 0.12),
        ("beside a GPipe that recomputes", "beside_recomputing", "x", GREEN, 0.0),
    )
    for label, key, mark, colour, shift in shown:
        points = [(row[key], i + shift) for i, row in enumerate(rows) if row[key]]
        axes.plot(*zip(*points, strict=True), mark, color=colour, label=label)
    axes.set_title("Simulated, V100s", loc="left")
    _finish(axes, [_name(row) for row in rows])


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['experiment']} ({row['num_devices']})"


def _draw_measured(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        ratio = row["times_as_fast"]
        axes.plot(
            [ratio["quartile_1"], ratio["quartile_3"]], [place, place], color=BLUE
        )
    places = range(len(rows))
    medians = [row["times_as_fast"]["of_medians"] for row in rows]
    simulated = [row["simulated_times_as_fast"] for row in rows]
    ideal = [row["ideal_times_as_fast"] for row in rows]
    axes.plot(medians, places, "o", color=BLUE, label="measured, with quartiles")
    axes.plot(simulated, places, "x", color=ORANGE, label="simulated from a profile")
    axes.plot(ideal, places, "|", color="black", markersize=12, label="ideal")
    axes.set_title("Measured, two CPU workers, BERT on MRPC", loc="left")
    _finish(axes, [_order(row) for row in rows])


def _order(row: Mapping[str, Any]) -> str:
    many = row["stages_per_device"]
    return row["schedule"] + (f" x {many}" if many > 1 else "")


def _finish(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()  # the first row on top, as in the table
    axes.axvline(1.0, color=GREY, linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small"
    )


def main() -> None:
    """Draw what is kept."""
    table = read_results("ooo-pipeline")
    PICTURE.write_text(speedups_svg(table), encoding="utf-8")


if __name__ == "__main__":
    main()
