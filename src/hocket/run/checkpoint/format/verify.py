"""Reads every byte of a checkpoint, and compares it with its hash."""

from __future__ import annotations

from pathlib import Path

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    TensorLocation,
    check_pointer,
    damaged_tensor,
    hash_range,
    open_checkpoint,
    open_file,
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
            file_path = path / file.name
            with open_file(file_path) as handle:
                for name, record, begin in file.locations():
                    found = hash_range(handle, begin, record.num_bytes, file_path)
                    if found != record.sha256:
                        raise damaged_tensor(
                            TensorLocation(file_path, begin, record), name
                        )
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
