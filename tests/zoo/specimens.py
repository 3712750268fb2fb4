"""All architectures of the zoo, beside the small models of `tests/run`.

torchvision's operators are declared before anything imports it; where it is not
installed, its architectures are left out.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from tests.run.support.small_models import Specimen

HAS_TORCHVISION: Final = find_spec("torchvision") is not None
NEED_TORCHVISION: Final = (
    "densenet",
    "mobilenetv3",
    "resnext",
    "retinanet",
)


def _specimens() -> dict[str, Specimen]:
    from tests.zoo.odd import ODD
    from tests.zoo.text import TEXT
    from tests.zoo.unet import UNET

    found = {**ODD, **TEXT, **UNET}
    if HAS_TORCHVISION:
        from tests.zoo.vision import VISION

        found |= VISION
    return found


SPECIMENS: Final = _specimens()
