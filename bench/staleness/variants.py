"""How old the weights are that each half reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Args:
        title: in tables and pictures.
        delays: of the front half and of the back half, in updates.
    """

    title: str
    delays: tuple[int, int]


SYNCHRONOUS: Final = "synchronous"
VARIANTS: Final = {
    SYNCHRONOUS: Variant("synchronous", (0, 0)),
    "2bw": Variant("2BW", (1, 1)),
    "wpipe": Variant("WPipe", (1, 0)),
}
