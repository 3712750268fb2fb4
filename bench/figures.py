"""How pictures of results are written: as SVG, alike each time, for light and dark.

matplotlib paints for a white page. A reader who prefers a dark one gets the same
shapes in other colours: a rule of the SVG's style replaces each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from hocket.draw.palette import SURFACES, Theme

# Of Okabe and Ito's colours, which every eye distinguishes.
BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#D55E00"
GREEN: Final = "#009E73"
GREY: Final = "#9A9A9A"
BLACK: Final = "#000000"

_DARK: Final = SURFACES[Theme.DARK]
# What becomes of matplotlib's colours, and of those that are too dim on a dark page.
_IN_THE_DARK: Final = {
    "#FFFFFF": _DARK["page"],
    BLACK: _DARK["ink"],
    "#B0B0B0": "#7A8490",  # lines of the grid
    "#CCCCCC": _DARK["grid"],  # frames
    BLUE: "#2F80CC",
    SKY: "#9AD3F5",
    ORANGE: "#EB7A2B",
    GREEN: "#1FBF92",
}


def svg_of(
    draw: Callable[[Figure], None], width: float, height: float, font_size: float = 9.0
) -> str:
    """The SVG of a figure.

    Args:
        draw: on the figure.
        width: inches.
        height: inches.
        font_size: points.
    """
    with rc_context(
        {
            "svg.hashsalt": "hocket",
            "font.size": font_size,
            "axes.titlesize": font_size,
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        page = StringIO()
        figure.savefig(page, format="svg", metadata={"Date": None})
    return for_both_themes(page.getvalue())


def for_both_themes(svg: str) -> str:
    """The same picture, with other colours where the reader prefers a dark page.

    Args:
        svg: as matplotlib writes it, for a white page.
    """
    rules = [f"svg{{fill:{_DARK['ink']}}}"]  # what is black without saying so
    for light, dark in _IN_THE_DARK.items():
        rules += [
            f'[style*="{name}: {light.lower()}"]{{{name}:{dark}!important}}'
            for name in ("fill", "stroke")
        ]
    style = "\n@media (prefers-color-scheme:dark){" + "".join(rules) + "}</style>"
    return svg.replace("</style>", style, 1)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each name, the first on top, as in a table."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
