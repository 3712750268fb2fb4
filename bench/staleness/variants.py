"""How old the weights are that each half reads, and what is done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hocket.options import CorrectionName


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Args:
        title: in tables and pictures.
        delays: of the front half and of the back half, in updates.
        correction: of the updates of delayed stages, as `hocket.emulate` calls it.
    """

    title: str
    delays: tuple[int, int]
    correction: CorrectionName = "none"


SYNCHRONOUS: Final = "synchronous"
VARIANTS: Final = {
    SYNCHRONOUS: Variant("synchronous", (0, 0)),
    "2bw": Variant("2BW", (1, 1)),
    "wpipe": Variant("WPipe", (1, 0)),
    "wpipe, error-feedback": Variant("WPipe, error feedback", (1, 0), "error-feedback"),
    "wpipe, weight-prediction": Variant(
        "WPipe, weight prediction", (1, 0), "weight-prediction"
    ),
    "wpipe, lr-discount": Variant("WPipe, lr discount", (1, 0), "lr-discount"),
}
