"""Describe a picture as plain shapes, before a theme gives them colours.

Lengths are in points at the picture's own size, from its upper left corner. Shapes are
painted in order. A colour is a role (what the shape is) or a fill (which op), never a
number: the theme says what it looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from hocket.core.op import Kind
from hocket.draw import palette
from hocket.draw.palette import SURFACES, Theme

Point = tuple[float, float]


class Role(Enum):
    """What a shape is, where it is not an op. The value is its name in `SURFACES`."""

    PAGE = "page"
    TRACK = "track"
    BAND = "band"
    INK = "ink"
    MUTED = "muted"
    GRID = "grid"
    CURVE = "curve"


@dataclass(frozen=True, slots=True)
class AreaFill:
    """The colour of an op: its kind, and how much it is faded."""

    kind: Kind
    tone: float = 0.0


@dataclass(frozen=True, slots=True)
class TextOn:
    """The colour of text on a fill."""

    fill: AreaFill


Paint = Role | AreaFill | TextOn


class Anchor(Enum):
    """Which part of a text stands at its point. The value is SVG's word."""

    START = "start"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    paint: Paint
    corner: float = 0.0
    hint: str = ""  # shown when a pointer rests on it


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    paint: Paint = Role.INK
    anchor: Anchor = Anchor.START
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Path:
    """A line through points, or with `opacity` the area that it encloses."""

    points: tuple[Point, ...]
    paint: Paint
    width: float = 1.0
    opacity: float | None = None


Shape = Box | Text | Path


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes on a page."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a time lies on the page.

    Args:
        left: the place of time 0.
        right: the place of the latest end.
        longest_s: the latest end of all panels.
    """

    left: float
    right: float
    longest_s: float

    def x(self, time_s: float) -> float:
        """Return the place of a time, counted from the timeline's begin."""
        share = time_s / self.longest_s if self.longest_s > 0 else 0.0
        return self.left + (self.right - self.left) * share


def colour(paint: Paint, theme: Theme) -> str:
    """Return what a paint looks like in a theme."""
    match paint:
        case Role():
            return SURFACES[theme][paint.value]
        case AreaFill(kind, tone):
            return palette.fill(kind, tone, theme)
        case TextOn(AreaFill(kind, tone)):
            return palette.text_on(palette.fill(kind, tone, theme))
        case _:
            assert_never(paint)
