"""Draw timelines as SVG: for papers, slides and pages, on light and dark ground."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import assert_never

from hocket.core.timelines.timeline import Timeline
from hocket.draw.layout import Style, Titled, lay_out
from hocket.draw.palette import Theme
from hocket.draw.scene import Box, Paint, Path, Scene, Shape, Text, colour

_FONT = (
    "-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'Liberation Sans', sans-serif"
)


def to_svg(
    timelines: Timeline | Sequence[Titled],
    *,
    title: str = "",
    style: Style | None = None,
    theme: Theme | None = None,
) -> str:
    """Draw one timeline, or several with titles on one time axis.

    Args:
        timelines: a timeline, or `(title, timeline)` pairs, drawn from top to bottom.
        title: above them all.
        style: what to show, and how large.
        theme: light or dark; by default light, and dark where the reader prefers it.

    Raises:
        PlanError: no timeline, or no room.
    """
    return svg_of(lay_out(timelines, title, style), theme)


def svg_of(scene: Scene, theme: Theme | None = None, *, scope: str = "") -> str:
    """Write a scene as an SVG document.

    Args:
        scene: what is drawn.
        theme: as of `to_svg`.
        scope: begins the selectors of its style, where it stands in a page of others.
    """
    names = _class_names(scene.shapes)
    size = f"{_number(scene.width)} {_number(scene.height)}"
    width, height = size.split()
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'width="{width}" height="{height}" role="img" font-family="{_FONT}">'
    )
    lines = [head, f"<title>{escape(scene.title)}</title>", _style(names, theme, scope)]
    lines += [_element(shape, names) for shape in scene.shapes]
    return "\n".join([*lines, "</svg>", ""])


def _class_names(shapes: Iterable[Shape]) -> dict[Paint, str]:
    paints = dict.fromkeys(shape.paint for shape in shapes)
    return {paint: f"c{i}" for i, paint in enumerate(paints)}


def _style(names: dict[Paint, str], theme: Theme | None, scope: str) -> str:
    """Write a class per paint: `fill` through `color`, so that lines can use it too."""
    filled = ",".join(f"{scope}{kind}" for kind in ("rect", "text", ".area"))
    shared = (
        f"{filled}{{fill:currentColor}}{scope}.line{{fill:none;stroke:currentColor;"
        f"stroke-linejoin:round}}{scope}text{{font-variant-numeric:tabular-nums}}"
    )
    rules = shared + _rules(names, theme or Theme.LIGHT, scope)
    if theme is None:
        dark = _rules(names, Theme.DARK, scope)
        rules += f"\n@media (prefers-color-scheme:dark){{{dark}}}"
    return f"<style>{rules}</style>"


def _rules(names: dict[Paint, str], theme: Theme, scope: str) -> str:
    return "".join(
        f"{scope}.{name}{{color:{colour(paint, theme)}}}"
        for paint, name in names.items()
    )


def _element(shape: Shape, names: dict[Paint, str]) -> str:
    match shape:
        case Box():
            return _rect(shape, names[shape.paint])
        case Text():
            return _text(shape, names[shape.paint])
        case Path():
            return _path(shape, names[shape.paint])
        case _:
            assert_never(shape)


def _rect(box: Box, name: str) -> str:
    attributes = {"x": box.x, "y": box.y, "width": box.width, "height": box.height}
    if box.corner:
        attributes["rx"] = box.corner
    written = " ".join(f'{key}="{_number(value)}"' for key, value in attributes.items())
    if box.hint:
        return (
            f'<rect class="{name}" {written}><title>{escape(box.hint)}</title></rect>'
        )
    return f'<rect class="{name}" {written}/>'


def _text(text: Text, name: str) -> str:
    weight = ' font-weight="600"' if text.bold else ""
    return (
        f'<text class="{name}" x="{_number(text.x)}" y="{_number(text.y)}" '
        f'font-size="{_number(text.size)}" text-anchor="{text.anchor.value}"{weight}>'
        f"{escape(text.text)}</text>"
    )


def _path(path: Path, name: str) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in path.points)
    if path.opacity is not None:
        opacity = _number(path.opacity)
        return f'<polygon class="area {name}" opacity="{opacity}" points="{points}"/>'
    width = _number(path.width)
    return f'<polyline class="line {name}" stroke-width="{width}" points="{points}"/>'


def _number(number: float) -> str:
    """Write a length with at most two decimals."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
