"""Draw timelines: text, SVG, one HTML page, and traces for Perfetto.

Imports `core`. Begin with `layout.py`, which places what `svg.py` paints; `html/`
makes pages.
"""

from __future__ import annotations

from hocket.draw.html import Chart, Facts, Line, Table, to_html
from hocket.draw.layout import Style
from hocket.draw.palette import Theme
from hocket.draw.perfetto import to_perfetto
from hocket.draw.svg import to_svg
from hocket.draw.text import to_text

__all__ = [
    "Chart",
    "Facts",
    "Line",
    "Style",
    "Table",
    "Theme",
    "to_html",
    "to_perfetto",
    "to_svg",
    "to_text",
]
