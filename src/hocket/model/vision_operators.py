"""Let torchvision be imported beside a torch without CUDA.

The torchvision of the package index brings its own operators in a library that needs
CUDA. Beside a CPU-only torch the library does not load; torchvision goes on without it,
and then stops at the first line that describes one of them:

    RuntimeError: operator torchvision::nms does not exist

Two of them have to exist by name. Then every model can be made and trained; only what
really calls them (the choice among overlapping detections, in evaluation) cannot run.

`import torch` calls this itself, as the entry point "torch.backends" of hocket's
package asks it to: so `import torchvision` works where hocket is installed, imported or
not. TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches that off.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

_OPERATORS: Final = ("nms", "qnms")
_SIGNATURE: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def declare_vision_operators() -> torch.library.Library | None:
    """Declare torchvision's operators, where its own library cannot be loaded.

    Returns:
        What holds the declarations; None if none were needed.
    """
    spec = None if torch.version.cuda else find_spec("torchvision")
    if spec is None or _is_loadable(spec.submodule_search_locations or ()):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(name + _SIGNATURE)
    return library


def _is_loadable(folders: Iterable[str]) -> bool:
    """Load torchvision's own library, and return whether its operators are there."""
    try:
        for folder in folders:
            for file in Path(folder).glob("_C*.so"):
                torch.ops.load_library(file)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, _OPERATORS[0])
