"""Draw one self-contained page per timeline or training run.

Imports the other files of `draw`. Begin with `page.py`; `content.py` has what a page
may hold.
"""

from __future__ import annotations

from hocket.draw.html.content import Chart, Facts, Figure, Line, Table
from hocket.draw.html.page import to_html

__all__ = ["Chart", "Facts", "Figure", "Line", "Table", "to_html"]
