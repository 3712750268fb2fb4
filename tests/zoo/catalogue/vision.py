"""Networks of timm at their own widths, on images of 64 x 64 pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import timm
import torch

from tests.model.support.stages_by_hand import Case
from tests.zoo.catalogue.entries import NAMES

# These take images of no other size than the one that they are made for.
_SIZED: Final = (
    *("mixer_s32_224", "resmlp_12_224", "gmlp_ti16_224", "vit_tiny_patch16_224"),
    *("cait_xxs24_224", "levit_128s"),
)


def network(name: str) -> Case:
    """A network of timm for three classes."""
    size: dict[str, Any] = {"img_size": 64} if name in _SIZED else {}
    model = timm.create_model(name, pretrained=False, num_classes=3, **size)
    return Case(model.train(), (torch.randn(4, 3, 64, 64),), smallest=2)


CASES: Final[dict[str, Callable[[], Case]]] = {
    name: partial(network, name) for name in NAMES["vision"]
}
