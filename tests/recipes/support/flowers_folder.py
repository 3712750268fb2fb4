"""A small folder in the form of Oxford's 102 flowers, tables as MATLAB writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.io import savemat

NUM_IMAGES = 12


def flowers(folder: Path) -> Path:
    """Four images to train on, four for validation, four for test; all are small."""
    from PIL import Image

    (folder / "jpg").mkdir(parents=True)
    for number in range(1, NUM_IMAGES + 1):
        picture = Image.new("RGB", (20 + number, 30), (20 * number, 40, 90))
        picture.save(folder / "jpg" / f"image_{number:05d}.jpg")
    write_labels(folder, [1 + 9 * i for i in range(NUM_IMAGES)])
    savemat(
        folder / "setid.mat",
        {"trnid": [[2, 4, 6, 8]], "valid": [[1, 3, 5, 7]], "tstid": [[12, 11, 10, 9]]},
    )
    return folder


def write_labels(folder: Path, labels: list[int]) -> None:
    """As the official file has them: a row of bytes."""
    savemat(folder / "imagelabels.mat", {"labels": np.array([labels], dtype=np.uint8)})
