"""Reads a text file as bytes, in windows: each byte's target is the next byte.

    file     T h e   c a t   s a t   d o w n .
    window   └─ inputs ──┘
               └─ targets ─┘

Windows follow each other without overlap; the last part of the file is for evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.run.data.batch import digest
from hocket.run.data.samples import EpochRandom


@dataclass(frozen=True, slots=True)
class TextWindows:
    """Windows of one part of a file.

    Args:
        windows: (N, window_bytes + 1) bytes; a view of the file's.
        fingerprint: the digest of some thousand bytes all over the file, which may be
            larger than the memory.
    """

    windows: Tensor
    fingerprint: int

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.windows)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, window_bytes), int64; text is not augmented."""
        del draw
        return self.windows[rows, :-1].long()

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, window_bytes), int64: each byte's next one."""
        del draw
        return self.windows[rows, 1:].long()


def load_text(
    path: Path, window_bytes: int, validation_fraction: float
) -> tuple[TextWindows, TextWindows]:
    """Load the windows for training and for validation.

    The file is mapped into memory, not read: it may be larger than that.

    Raises:
        DataError: there is no such file, it cannot be read, or it is too short for one
            window in each part.
    """
    num_bytes = _size(path)
    num_validation = round(validation_fraction * num_bytes)
    shortest = min(num_validation, num_bytes - num_validation)
    if shortest <= window_bytes:
        raise DataError(
            f"{path} is too short: of its {num_bytes} bytes, {num_validation} are for "
            f"validation (data.validation_fraction {validation_fraction:g}) and "
            f"{num_bytes - num_validation} for training, and each part needs at least "
            f"{window_bytes + 1} (data.window_bytes {window_bytes} and one more)"
        )
    try:
        data = torch.from_file(
            str(path), shared=False, size=num_bytes, dtype=torch.uint8
        )
    except RuntimeError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    cut = num_bytes - num_validation
    training, validation = (
        TextWindows(part.unfold(0, window_bytes + 1, window_bytes), digest(data))
        for part in (data[:cut], data[cut:])
    )
    return training, validation


def _size(path: Path) -> int:
    if not path.is_file():
        what = "is a folder, not a text file" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}: name one with --set data.path=FILE")
    return path.stat().st_size
