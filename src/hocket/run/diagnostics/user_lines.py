"""Finds the user's own lines in an error's traceback, among those of libraries."""

from __future__ import annotations

import os
import site
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_HOCKET: Final = str(Path(__file__).parents[2]) + os.sep
_FOLDERS: Final = (
    str(Path(os.__file__).parent),  # the standard library
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_LIBRARIES: Final = (_HOCKET, *(folder + os.sep for folder in _FOLDERS))


def user_lines(error: BaseException) -> list[str]:
    """Return the innermost line of the user's code, and the one that called hocket.

    Args:
        error: an error that is being handled, so that its callers still run.

    Returns:
        Two lines of text for each, as in a traceback; of an error without a line of the
        user's, the innermost one.
    """
    return lines_of(_frames(error))


def lines_of(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """Return these lines (see `user_lines`).

    Args:
        frames: the outermost first.
    """
    own = [i for i, frame in enumerate(frames) if _is_users(frame.filename)]
    if not own:
        return [line for frame in frames[-1:] for line in _lines(frame)]
    calls = [i for i in own[:-1] if frames[i + 1].filename.startswith(_HOCKET)]
    shown = [own[-1], *calls[-1:]]
    return [line for i in shown for line in _lines(frames[i])]


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error and its causes, behind those of their callers."""
    found: list[traceback.FrameSummary] = []
    trace = error.__traceback__
    if trace is not None:
        above = traceback.walk_stack(trace.tb_frame.f_back)
        found += reversed(traceback.StackSummary.extract(above))
    one: BaseException | None = error
    seen: set[int] = set()  # `raise error from error` is a circle
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        found += traceback.extract_tb(one.__traceback__)
        one = one.__cause__
    return found


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_LIBRARIES))


def _lines(frame: traceback.FrameSummary) -> list[str]:
    place = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    return [place, f"    {frame.line}"] if frame.line else [place]
