"""Idle shares of full pipelines as one picture: formulas as lines, devices as points.

    python -m bench.emulated.picture

draws it again from what is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.emulated.flush_free import FORWARD_S, RESULTS, Job, steady_idle
from bench.figures import BLUE, ORANGE, SKY, svg_of

KEPT: Final = RESULTS / "flush_free.json"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "idle-shares.svg"

Row = dict[str, Any]

_SHOWN: Final = {
    "wpipe": (ORANGE, "o"),
    "pipedream-2bw": (BLUE, "s"),
    "wpipe-overlapped": (SKY, "D"),
}


def idle_shares_svg(rows: list[Row]) -> str:
    """A panel for each number of devices.

    Args:
        rows: of the benchmark.
    """
    sizes = sorted({row["num_devices"] for row in rows})
    most = 100 * max(max(row["measured"], row["formula"]) for row in rows)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, num_devices in zip(panels, sizes, strict=True):
            _draw(axes, [row for row in rows if row["num_devices"] == num_devices])
            axes.set_title(f"{num_devices} emulated devices", loc="left")
            axes.set_xlabel("a message takes, in forwards")
        panels[0].set_ylim(0, 1.06 * most)
        panels[0].set_ylabel("idle while the pipeline is full, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)

    return svg_of(draw, 8.6, 3.2)


def _draw(axes: Axes, rows: list[Row]) -> None:
    furthest = max(row["delay"] for row in rows)
    delays = np.linspace(0.0, furthest, 40)
    for name, (colour, mark) in _SHOWN.items():
        own = [row for row in rows if row["schedule"] == name and not row["clips"]]
        if not own:
            continue
        num_devices = own[0]["num_devices"]
        jobs = [Job(name, float(delay), 0, FORWARD_S, "") for delay in delays]
        formula = [100 * steady_idle(name, num_devices, job) for job in jobs]
        axes.plot(delays, formula, color=colour, linewidth=1.0, clip_on=False)
        axes.plot(
            [row["delay"] for row in own],
            [100 * row["measured"] for row in own],
            mark,
            color=colour,
            markersize=5,
            label=name,
            clip_on=False,
        )
    axes.set_xlim(0, 1.04 * furthest)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draw what is kept."""
    rows = json.loads(KEPT.read_text(encoding="utf-8"))["rows"]
    PICTURE.write_text(idle_shares_svg(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
