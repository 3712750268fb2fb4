"""All runs as one picture: a row per case, how it was learned and what came of it.

    python -m bench.staleness.picture

draws it again from what is kept.
"""

from __future__ import annotations

import json
from io import StringIO
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.figures import for_both_themes
from bench.staleness.spread import Row, first_rows, runs_of
from bench.staleness.table import METRICS
from bench.staleness.variants import SYNCHRONOUS, VARIANTS

KEPT: Final = Path(__file__).parent / "results" / "cpu.json"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "staleness.svg"

# Okabe and Ito's colours, which every eye distinguishes, in the order of the variants.
COLOURS: Final = dict(
    zip(
        VARIANTS,
        ("#000000", "#D55E00", "#0072B2"),
        strict=True,
    )
)
_BESIDE: Final = 0.12  # between the seeds of one variant
_HALF: Final = 0.3  # of a mean's bar
_HIGHEST: Final = 1.25  # times the synchronous run's highest loss, that is shown
_OLDER: Final = ("2bw", "wpipe")  # whose curves have bands


def staleness_svg(rows: list[Row]) -> str:
    """Training losses, their distance to the synchronous run's, and final quality.

    Args:
        rows: of the benchmark.
    """
    cases = first_rows(rows)
    with rc_context({"svg.hashsalt": "hocket", "font.size": 8.5}):
        figure = Figure(figsize=(9.6, 1.6 * len(cases) + 0.7), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(
            len(cases), 3, squeeze=False, width_ratios=(1.15, 1.15, 1.0)
        )
        for (case, first), (left, middle, right) in zip(
            cases.items(), panels, strict=True
        ):
            left.set_title(f"{case}: training loss", loc="left")
            middle.set_title("minus synchronous", loc="left")
            _draw_losses(left, rows, case, first)
            _draw_distances(middle, rows, case, first)
            _draw_quality(right, rows, case, first)
        for axes in panels[-1][:2]:
            axes.set_xlabel("thousand samples")
        handles, labels = panels[0][2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6)
        page = StringIO()
        figure.savefig(page, format="svg", metadata={"Date": None})
    return for_both_themes(page.getvalue())


def _draw_losses(axes: Axes, rows: list[Row], case: str, first: Row) -> None:
    for variant in COLOURS:
        curves = _shown(rows, case, variant)
        if len(curves):
            _plot(axes, first, curves, variant)
    axes.grid(alpha=0.3)


def _draw_distances(axes: Axes, rows: list[Row], case: str, first: Row) -> None:
    """Of each seed to its own synchronous run; bands from the least to the most."""
    plain = _curves(rows, case, SYNCHRONOUS)
    axes.axhline(0.0, color=COLOURS[SYNCHRONOUS], linewidth=0.8)
    for variant, colour in COLOURS.items():
        curves = _shown(rows, case, variant)
        if variant == SYNCHRONOUS or curves.shape != plain.shape or not len(plain):
            continue
        distances = curves - plain
        _plot(axes, first, distances, variant)
        if variant in _OLDER:
            axes.fill_between(
                _places(first),
                distances.min(0),
                distances.max(0),
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
    axes.grid(alpha=0.3)


def _plot(axes: Axes, first: Row, curves: NDArray[np.float64], variant: str) -> None:
    """The mean over seeds."""
    axes.plot(
        _places(first),
        curves.mean(0),
        color=COLOURS[variant],
        linewidth=1.2,
    )


def _draw_quality(axes: Axes, rows: list[Row], case: str, first: Row) -> None:
    """A point per seed, and a bar at the mean."""
    title, factor, _ = METRICS[first["metric"]]
    for place, (variant, colour) in enumerate(COLOURS.items()):
        found = [row["value"] for row in runs_of(rows, case, variant)]
        values = [factor * value for value in found if value is not None]
        if len(values) < len(found):
            axes.text(
                place,
                0.04,
                "diverged",
                color=colour,
                rotation=90,
                ha="center",
                transform=axes.get_xaxis_transform(),
            )
        if not values:
            continue
        middle = (len(values) - 1) / 2
        axes.plot(
            [place + _BESIDE * (i - middle) for i in range(len(values))],
            values,
            "o",
            color=colour,
            markersize=3.5,
            label=VARIANTS[variant].title,
        )
        axes.plot([place - _HALF, place + _HALF], [fmean(values)] * 2, color=colour)
    axes.set_xlim(-0.6, len(COLOURS) - 0.4)
    axes.set_xticks([])
    axes.set_title(title, loc="left")
    axes.grid(axis="y", alpha=0.3)


def _shown(rows: list[Row], case: str, variant: str) -> NDArray[np.float64]:
    """The curves of all seeds; one that diverges leaves the picture."""
    plain, curves = (_curves(rows, case, which) for which in (SYNCHRONOUS, variant))
    if not np.isfinite(plain).any():
        return curves
    return np.where(curves > _HIGHEST * np.nanmax(plain), nan, curves)


def _curves(rows: list[Row], case: str, variant: str) -> NDArray[np.float64]:
    """(seeds, points); what has left the numbers leaves a gap."""
    found = [row["curve"] for row in runs_of(rows, case, variant)]
    return np.array([[nan if x is None else x for x in curve] for curve in found])


def _places(first: Row) -> NDArray[np.float64]:
    """The middle of each point's steps, in thousands of samples."""
    num_points = len(first["curve"])
    parts = (np.arange(num_points) + 0.5) / num_points
    return parts * first["num_samples"] / 1e3


def main() -> None:
    """Draw what is kept."""
    rows = json.loads(KEPT.read_text(encoding="utf-8"))["rows"]
    PICTURE.write_text(staleness_svg(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
