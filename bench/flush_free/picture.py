"""What was measured as one picture: steps above, memory below, a column per model.

    python -m bench.flush_free.picture

draws it again from what is kept.
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, name_rows, svg_of
from bench.flush_free.table import BOUND, FLUSH_FREE, KINDS

KEPT: Final = Path(__file__).parent / "results" / "cpu.json"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "flush-free-steps.svg"

Row = dict[str, Any]

_KINDS: Final = dict(  # their names, and colours
    zip(
        KINDS,
        (
            ("weights", BLUE),
            ("old weights", ORANGE),
            ("gradients", SKY),
            ("optimizer", GREY),
            ("activations, messages", GREEN),
        ),
        strict=True,
    )
)
_MIB: Final = 2**20


def steps_and_memory_svg(rows: list[Row]) -> str:
    """A column per model.

    Args:
        rows: of the benchmark.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    timed = [[row for row in _of(rows, case) if "step" in row] for case in cases]
    held = [[row for row in _of(rows, case) if "devices" in row] for case in cases]
    heights = [max(map(len, found)) + 1 for found in (timed, held)]
    ratios = [row["step_over_bound"] for found in timed for row in found]
    most = max(ratio["quartile_3"] for ratio in ratios)
    least = min(1.0, *(ratio["quartile_1"] for ratio in ratios))

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(
            2, len(cases), squeeze=False, height_ratios=heights, sharey="row"
        )
        for i, case in enumerate(cases):
            above[i].set_title(f"{case}: a step, times its bound", loc="left")
            above[i].set_xlim(least - 0.02, most + 0.02)
            _draw_steps(above[i], timed[i])
            _draw_memory(below[i], held[i])
        handles, labels = below[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=5, frameon=False
        )

    return svg_of(draw, 9.6, 0.24 * sum(heights) + 1.5)


def _of(rows: list[Row], case: str) -> list[Row]:
    return [row for row in rows if row["case"] == case]


def _draw_steps(axes: Axes, rows: list[Row]) -> None:
    """The quartiles of rounds, and the ratio of medians."""
    axes.axvline(1.0, color=BLACK, linewidth=0.9)
    axes.axvline(BOUND, color=ORANGE, linewidth=0.9, linestyle="--")
    for place, row in enumerate(rows):
        ratio = row["step_over_bound"]
        colour = ORANGE if row["schedule"] in FLUSH_FREE else BLACK
        ends = [ratio["quartile_1"], ratio["quartile_3"]]
        axes.plot(ends, [place, place], color=colour)
        axes.plot(ratio["of_medians"], place, "o", color=colour, markersize=4.5)
    name_rows(axes, [_name(row) for row in rows])


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    """As many microbatches as were timed, and below as few as there can be."""
    numbers = list(dict.fromkeys(row["num_microbatches"] for row in rows))
    many = f": {numbers[0]} microbatches, then {numbers[-1]}"
    axes.set_title("MiB" + (many if len(numbers) > 1 else ""), loc="left")
    for place, row in enumerate(rows):
        sizes = [
            sum(device[f"{kind}_bytes"] for device in row["devices"]) / _MIB
            for kind in KINDS
        ]
        begins = accumulate(sizes, initial=0.0)
        for kind, begin, size in zip(KINDS, begins, sizes, strict=False):
            name, colour = _KINDS[kind]
            label = name if place == 0 else None
            axes.barh(place, size, 0.62, begin, color=colour, label=label)
    for place, (row, after) in enumerate(pairwise(rows)):
        if row["num_microbatches"] != after["num_microbatches"]:
            axes.axhline(place + 0.5, color=GREY, linewidth=0.8)
    name_rows(axes, [_name(row) for row in rows])


def _name(row: Row) -> str:
    """Models differ in which order with I and W was the fastest."""
    name: str = row["schedule"]
    return "best zero-bubble" if name.startswith("zb-") else name


def main() -> None:
    """Draw what is kept."""
    rows = json.loads(KEPT.read_text(encoding="utf-8"))["rows"]
    PICTURE.write_text(steps_and_memory_svg(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
