"""Let notebooks show schedules and timelines as pictures, and files hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Drawn:
    """Something that a notebook shows as HTML.

    Attributes:
        drawing: returns the HTML of an instance. `hocket/__init__.py` sets it, since
            `core` imports no `draw`.
        csv: returns the module that writes and reads PyTorch's CSV, which reads
            schedules itself. Set there, too.
    """

    drawing: ClassVar[Callable[[Any], str]]
    csv: ClassVar[Callable[[], Any]]

    def _repr_html_(self) -> str:
        return type(self).drawing(self)
