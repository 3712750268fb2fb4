"""Draw timelines as PNG by matplotlib: the same shapes as the SVG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, assert_never

from hocket.core.timelines.timeline import Timeline
from hocket.draw.layout import Style, Titled, lay_out
from hocket.draw.palette import Theme
from hocket.draw.scene import Anchor, Box, Path, Scene, Shape, Text, colour
from hocket.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS_PER_INCH = 72.0

# matplotlib brings DejaVu Sans with it, so pictures do not depend on the machine; it
# is wider than the fonts that the layout reckons with.
_FONT_SCALE = 0.9
_ALIGNMENTS = {Anchor.START: "left", Anchor.MIDDLE: "center", Anchor.END: "right"}


def to_png(
    timelines: Timeline | Sequence[Titled],
    *,
    title: str = "",
    style: Style | None = None,
    theme: Theme = Theme.LIGHT,
    pixels_per_point: float = 2.0,
) -> bytes:
    """Draw one timeline, or several with titles on one time axis.

    Args:
        timelines: a timeline, or `(title, timeline)` pairs, drawn from top to bottom.
        title: above them all.
        style: what to show, and how large, in points.
        theme: the ground.
        pixels_per_point: 2 is sharp on most screens.

    Raises:
        MissingPackageError: matplotlib is not installed.
        PlanError: no timeline, or no room.
    """
    return png_of(lay_out(timelines, title, style), theme, pixels_per_point)


def png_of(scene: Scene, theme: Theme, pixels_per_point: float) -> bytes:
    """Paint a scene as a PNG file's bytes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError(
            "PNG pictures need matplotlib, which is not installed: "
            "pip install 'hocket[plot]', or draw an SVG, which needs nothing"
        ) from None
    inches = scene.width / _POINTS_PER_INCH, scene.height / _POINTS_PER_INCH
    figure = Figure(figsize=inches, dpi=_POINTS_PER_INCH * pixels_per_point)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    for shape in scene.shapes:
        _paint(axes, shape, theme)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _paint(axes: Axes, shape: Shape, theme: Theme) -> None:
    ink = colour(shape.paint, theme)
    match shape:
        case Box():
            _paint_box(axes, shape, ink)
        case Text():
            _paint_text(axes, shape, ink)
        case Path():
            _paint_path(axes, shape, ink)
        case _:
            assert_never(shape)


def _paint_box(axes: Axes, box: Box, ink: str) -> None:
    from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

    place = (box.x, box.y)
    patch: Patch
    if box.corner:
        patch = FancyBboxPatch(
            place,
            box.width,
            box.height,
            boxstyle=f"round,pad=0,rounding_size={box.corner}",
            linewidth=0,
            facecolor=ink,
        )
    else:
        patch = Rectangle(place, box.width, box.height, linewidth=0, facecolor=ink)
    axes.add_patch(patch)


def _paint_text(axes: Axes, text: Text, ink: str) -> None:
    axes.text(
        text.x,
        text.y,
        text.text,
        fontsize=text.size * _FONT_SCALE,
        color=ink,
        ha=_ALIGNMENTS[text.anchor],
        va="baseline",
        weight="bold" if text.bold else "normal",
        family="DejaVu Sans",
        parse_math=False,
    )


def _paint_path(axes: Axes, path: Path, ink: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Polygon

    if path.opacity is not None:
        area = Polygon(path.points, facecolor=ink, alpha=path.opacity, linewidth=0)
        axes.add_patch(area)
        return
    xs, ys = zip(*path.points, strict=True)
    axes.add_line(Line2D(xs, ys, color=ink, linewidth=path.width))
