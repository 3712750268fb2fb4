"""Small folders in STL-10's format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NAMES = "airplane bird car cat deer dog horse monkey ship truck"
NUM_IMAGES = {"train": 12, "test": 8, "unlabeled": 7}


def pixels(part: str) -> NDArray[np.uint8]:
    """(N, 3, 96 rows, 96 columns), random."""
    rng = np.random.default_rng(len(part))
    return rng.integers(0, 256, (NUM_IMAGES[part], 3, 96, 96), dtype=np.uint8)


def classes(part: str) -> list[int]:
    """From 1 to 10."""
    return [1 + (3 * i) % 10 for i in range(NUM_IMAGES[part])]


def write(folder: Path) -> None:
    """Write files as the official ones, each colour column by column."""
    for part in NUM_IMAGES:
        columns_first = pixels(part).transpose(0, 1, 3, 2)
        (folder / f"{part}_X.bin").write_bytes(columns_first.tobytes())
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(classes(part)))
    (folder / "class_names.txt").write_text(NAMES.replace(" ", "\n") + "\n")
