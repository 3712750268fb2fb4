"""Let notebooks show schedules and timelines as pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Drawn:
    """Something that a notebook shows as HTML.

    Attributes:
        drawing: returns the HTML of an instance. `hocket/__init__.py` sets it, since
            `core` imports no `draw`.
    """

    drawing: ClassVar[Callable[[Any], str]]

    def _repr_html_(self) -> str:
        return type(self).drawing(self)
