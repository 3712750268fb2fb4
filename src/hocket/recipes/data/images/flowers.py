"""Oxford's flowers of 102 kinds, in their own form or in torchvision's.

    FOLDER/jpg/image_00001.jpg ...      8189 photographs of any size
    FOLDER/imagelabels.mat              "labels": 1 to 102, of each
    FOLDER/setid.mat                    "trnid", "valid", "tstid": their numbers

torchvision keeps the same in FOLDER/flowers-102. The two tables are MATLAB's files of
version 5, which SciPy reads (scikit-learn brings it); they hold numbers, and nothing in
them is run.

Source: Nilsback and Zisserman, "Automated flower classification over a large number of
classes", ICVGIP 2008; https://www.robots.ox.ac.uk/~vgg/data/flowers/102.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hocket.core.timelines.arrays import Ints
from hocket.errors import DataError
from hocket.recipes.data.images.image_folder import ImageFolder, check_pillow
from hocket.recipes.data.origin import DataOrigin

NUM_CLASSES: Final = 102
ORIGIN: Final = DataOrigin(
    "Flowers-102",
    "https://www.robots.ox.ac.uk/~vgg/data/flowers/102",
    "a folder with jpg/, imagelabels.mat and setid.mat",
)
_LABELS: Final = "imagelabels.mat"
_PARTS: Final = "setid.mat"
_INSIDE: Final = "flowers-102"  # where torchvision keeps them


def load_flowers(
    folder: Path, *, side: int = 224, with_validation: bool = True
) -> tuple[ImageFolder, ImageFolder]:
    """Load the photographs for training and those for test.

    Args:
        folder: a folder in the official form, or torchvision's root.
        side: the pixels that every image is scaled and cropped to.
        with_validation: train on the images for validation, too.

    Raises:
        DataError: a file or an image is missing, a table holds something else, or
            SciPy or Pillow is not installed.
    """
    check_pillow()
    if (folder / _INSIDE).is_dir():
        folder = folder / _INSIDE
    labels = _numbers(ORIGIN.find(folder, _LABELS), "labels", NUM_CLASSES)
    parts = ORIGIN.find(folder, _PARTS)
    names = ("trnid", "valid") if with_validation else ("trnid",)
    training = [_numbers(parts, name, len(labels)) for name in names]
    test = _numbers(parts, "tstid", len(labels))
    return (
        _images(folder, np.concatenate(training), labels, side),
        _images(folder, test, labels, side),
    )


def _images(folder: Path, numbers: Ints, labels: Ints, side: int) -> ImageFolder:
    paths = [folder / "jpg" / f"image_{number:05d}.jpg" for number in numbers.tolist()]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} images are missing, the first is "
            f"{missing[0]}: {ORIGIN.advice}"
        )
    chosen = labels[numbers - 1] - 1
    entries = [
        (path.name, path.stat().st_size, label)
        for path, label in zip(paths, chosen.tolist(), strict=True)
    ]
    names = tuple(str(kind) for kind in range(1, NUM_CLASSES + 1))
    digest = zlib.crc32(repr((side, entries)).encode())
    return ImageFolder(paths, torch.from_numpy(chosen), names, side, digest)


def _numbers(path: Path, name: str, most: int) -> Ints:
    """Return a row of a table: whole numbers from 1 to `most`."""
    found = _table(path).get(name)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise DataError(f"{path} has no row of numbers {name!r}: {ORIGIN.advice}")
    numbers = found.ravel().astype(np.int64)
    wrong = numbers[(numbers < 1) | (numbers > most)]
    if not numbers.size or wrong.size:
        what = "is empty" if not numbers.size else f"has {wrong[0]}"
        raise DataError(
            f"{path}: {name!r} {what}, where numbers from 1 to {most} are due. "
            f"{ORIGIN.advice}"
        )
    return numbers


def _table(path: Path) -> dict[str, object]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(
            "MATLAB's files are read by SciPy, which is not installed: "
            "pip install 'hocket[recipes]'"
        ) from error
    try:
        found: dict[str, object] = loadmat(str(path))
    except Exception as error:  # of many kinds, where a file is damaged
        raise DataError(
            f"{path} cannot be read as a MATLAB file ({error}): {ORIGIN.advice}"
        ) from error
    return found
