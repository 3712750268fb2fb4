"""The experiments as one picture: beside 2BW, simulated above, measured below.

    python -m bench.wpipe.picture

draws it again from what is kept.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, name_rows, svg_of
from bench.wpipe.experiments import FLUSHED, OVERLAPPED, TWO_BW, WPIPE
from bench.wpipe.simulate import SIMULATED
from hocket.planner.candidate import DDP

KEPT: Final = Path(__file__).parent / "results" / "cpu.json"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "wpipe.svg"

Row = dict[str, Any]

_TICKS: Final = (0.4, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
_HALF: Final = 0.36  # of a row's height, that a published number takes
_MARKS: Final = (  # schedule, what it is called, its mark, colour, and place in a row
    (DDP, "data parallel", "^", GREEN, 0.0),
    (FLUSHED, "1f1b", "x", GREY, 0.0),
    (OVERLAPPED, "wpipe-overlapped", "D", SKY, 0.14),
    (WPIPE, "wpipe", "o", ORANGE, -0.14),
)


def beside_2bw_svg(
    simulated: dict[str, Any], measured: dict[str, Any], num_inches: float = 9.4
) -> str:
    """Speed to the left, memory to the right.

    Args:
        simulated: of all experiments, as `bench.wpipe.simulate` keeps them.
        measured: as `bench.wpipe.run` keeps it.
        num_inches: of width.
    """
    rows, contestants = simulated["rows"], measured["rows"]
    heights = [len(rows) + 1, len(contestants) + 1]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(
            2, 2, height_ratios=heights, width_ratios=(1.9, 1.0), sharey="row"
        )
        (speed, memory), (measured_speed, old) = panels
        _draw_speed(speed, rows, simulated["published"]["times_as_fast"])
        _draw_memory(memory, rows, simulated["published"]["memory"])
        _draw_measured(measured_speed, contestants)
        _draw_old(old, contestants)
        shown = [speed.get_legend_handles_labels(), memory.get_legend_handles_labels()]
        handles, labels = ([*a, *b] for a, b in zip(*shown, strict=True))
        figure.legend(
            handles, labels, loc="outside upper center", ncols=4, frameon=False
        )

    return svg_of(draw, num_inches, 0.235 * sum(heights) + 1.9)


def _draw_speed(axes: Axes, rows: list[Row], published: float) -> None:
    axes.set_title("Simulated, V100s: times as fast as 2BW", loc="left")
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.axvline(1.0, color=BLACK, linewidth=0.9)
    for schedule, label, mark, colour, shift in _MARKS:
        points = [
            (row["times_as_fast"][schedule], i + shift)
            for i, row in enumerate(rows)
            if row["times_as_fast"].get(schedule) is not None
        ]
        axes.plot(
            *zip(*points, strict=True), mark, color=colour, markersize=5, label=label
        )
    _draw_alike(axes, rows, "times_as_fast", -0.14)
    _draw_published(axes, rows, published)
    _name_experiments(axes, rows)


def _draw_memory(axes: Axes, rows: list[Row], published: float) -> None:
    axes.set_title("memory, times 2BW's", loc="left")
    axes.axvline(1.0, color=BLACK, linewidth=0.9)
    _draw_alike(axes, rows, "memory", 0.0, "wpipe with 2BW's microbatches")
    _draw_published(axes, rows, published, "published, of large BERTs together")
    _name_experiments(axes, rows)


def _draw_alike(
    axes: Axes, rows: list[Row], key: str, shift: float, label: str | None = None
) -> None:
    points = [
        (row["alike"][key], i + shift)
        for i, row in enumerate(rows)
        if row["alike"][key] is not None
    ]
    axes.plot(
        *zip(*points, strict=True),
        "o",
        markerfacecolor="#FFFFFF",
        markeredgecolor=ORANGE,
        markersize=5,
        label=label,
        zorder=1.9,  # behind those that are no slower
    )


def _draw_published(
    axes: Axes, rows: list[Row], published: float, label: str = ""
) -> None:
    places = [i for i, row in enumerate(rows) if row["is_published"]]
    axes.vlines(
        [published] * len(places),
        [i - _HALF for i in places],
        [i + _HALF for i in places],
        BLUE,
        linewidth=2.0,
        label=label,
    )


def _name_experiments(axes: Axes, rows: list[Row]) -> None:
    """With a line between kinds of experiments."""
    for place, (row, after) in enumerate(pairwise(rows)):
        if _kind(row) != _kind(after):
            axes.axhline(place + 0.5, color=GREY, linewidth=0.6, alpha=0.6)
    name_rows(axes, [_name(row) for row in rows])


def _kind(row: Row) -> tuple[bool, str]:
    """What is done, and with what."""
    name: str = row["experiment"]
    is_tuned = name.endswith("fine-tuning")
    return is_tuned, "" if is_tuned else name.split(",")[0].split("-")[0]


def _name(row: Row) -> str:
    return f"{row['experiment']}  {row['layout']}" + (" R" if row["recomputes"] else "")


def _draw_measured(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("Measured, two CPU workers, BERT on MRPC", loc="left")
    axes.axvline(1.0, color=BLACK, linewidth=0.9)
    marks = {name: (mark, colour) for name, _, mark, colour, _ in _MARKS}
    for place, row in enumerate(rows):
        ratio = row["times_as_fast"]
        mark, colour = marks.get(_contestant(row), ("o", BLACK))
        ends = [ratio["quartile_1"], ratio["quartile_3"]]
        axes.plot(ends, [place, place], color=colour)
        axes.plot(ratio["of_medians"], place, mark, color=colour, markersize=5)
        axes.plot(row["simulated_times_as_fast"], place, "|", color=BLACK, markersize=9)
    axes.set_xlabel("times as fast as 2BW; line: quartiles; bar: simulated")
    name_rows(axes, [_label(row) for row in rows])


def _draw_old(axes: Axes, rows: list[Row]) -> None:
    """Of all workers, beside 2BW's, whose old weights are as many as its weights."""
    most = max(row["old_bytes"] for row in rows if row["schedule"] == TWO_BW)
    shares = [row["old_bytes"] / most for row in rows]
    axes.barh(range(len(rows)), shares, height=0.5, color=GREY)
    axes.set_title("old weights, times 2BW's", loc="left")
    axes.set_xlim(0, 1.15)
    name_rows(axes, [_label(row) for row in rows])


def _contestant(row: Row) -> str:
    """One device per pipeline has no pipeline at all."""
    return DDP if row["layout"].startswith("1x") else row["schedule"]


def _label(row: Row) -> str:
    name = _contestant(row)
    return "data parallel" if name == DDP else name


def main() -> None:
    """Draw what is kept."""
    simulated, measured = (
        json.loads(path.read_text(encoding="utf-8")) for path in (SIMULATED, KEPT)
    )
    PICTURE.write_text(beside_2bw_svg(simulated, measured), encoding="utf-8")


if __name__ == "__main__":
    main()
