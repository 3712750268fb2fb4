"""Reads every byte of a checkpoint, and compares it with its hash."""

from __future__ import annotations

from pathlib import Path

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    check_pointer,
    check_tensors,
    open_checkpoint,
)


def verify(path: str | Path) -> OpenedCheckpoint:
    """Check a whole checkpoint.

    Args:
        path: one checkpoint (`.../step-00000120`).

    Raises:
        DamagedError: a byte differs, or something is missing; names the file.
        CheckpointError: it is no checkpoint.
    """
    path = Path(path)
    check_pointer(path)
    opened = open_checkpoint(path)
    for part in opened.parts:
        for file in part.files:
            check_tensors(opened.locations_in(file))
    return opened


def is_whole(path: Path) -> bool:
    """Return whether manifest, parts and the lengths of all files are right.

    This check is quick: tensors are not read.
    """
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True
