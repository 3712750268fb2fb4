"""Finds the user's line of code for an error, and names the alternative."""

from __future__ import annotations

import linecache
import os
import traceback
from pathlib import Path
from typing import Any, Final

import torch

OTHER_WAY: Final = (
    "Ways out: a setting of the library with which it does not look at the data "
    '(transformers: experts_implementation="batched_mm", use_cache=False); to wrap the '
    "submodule that does in a module of your own with arguments and results of known "
    "shapes (model.part = Wrapped(model.part)), which then runs as it is; or an "
    "nn.Sequential of the model's submodules, which are then run as they are."
)
_TORCH_FOLDER: Final = f"{Path(torch.__file__).parent}{os.sep}"
_HOCKET_FOLDER: Final = f"{Path(__file__).parents[2]}{os.sep}"


def place_of(function: Any) -> str:
    """Return a function's name, and the line of the file in which it is written."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def source_line_of(frames: traceback.StackSummary) -> str:
    """Return the user's own line: the last one outside torch and hocket."""
    for frame in reversed(frames):
        ours = frame.filename.startswith((_TORCH_FOLDER, _HOCKET_FOLDER))
        if not ours and Path(frame.filename).exists():
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"  at {frame.filename}:{frame.lineno} in {frame.name}: {line}"
    return "  (no line of the model's own code is known)"
