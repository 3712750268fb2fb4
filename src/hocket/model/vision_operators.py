"""Let torchvision be imported beside a torch without CUDA.

The torchvision of the package index brings its own operators in a library that needs
CUDA. Beside a CPU-only torch the library does not load; torchvision goes on without it,
and then stops at the first line that describes one of them:

    RuntimeError: operator torchvision::nms does not exist

Two of them have to exist by name. Then every model can be made and trained; only what
really calls them (the choice among overlapping detections, in evaluation) cannot run.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

_OPERATORS: Final = ("nms", "qnms")
_SIGNATURE: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def declare_vision_operators() -> torch.library.Library | None:
    """Call this before torchvision, or whatever imports it, is imported.

    Returns:
        What holds the declarations, where any were needed.
    """
    if find_spec("torchvision") is None or _are_there():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(name + _SIGNATURE)
    return library


def _are_there() -> bool:
    """Whether torchvision's own library is loaded, or can be."""
    spec = find_spec("torchvision")
    assert spec is not None
    folders = spec.submodule_search_locations or ()
    files = [file for folder in folders for file in Path(folder).glob("_C*.so")]
    try:
        for file in files:
            torch.ops.load_library(file)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, _OPERATORS[0])
