"""Images in folders, one per class: any size, any format that Pillow reads.

    FOLDER/train/cat/any.jpg        class 0 is the first folder's name in the alphabet
    FOLDER/train/dog/other.png      class 1
    FOLDER/val/cat/third.jpg        the same classes

Pillow decodes them (torchvision installs it; its own functions are not needed). An
image is decoded when a batch reads it; only then is a broken one reported, by its path.

Source: the layout of ImageNet as torchvision's ImageFolder reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.images.image_tensors import Colours
from hocket.recipes.data.origin import DataOrigin
from hocket.run.data.samples import EpochRandom

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS: Final = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
IMAGENET_COLOURS: Final = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

_MARGIN: Final = 256 / 224  # what evaluation scales to, before it cuts out the middle
_LEAST_AREA: Final = 0.08  # of the image, that a training sample shows
_NUM_RANDOM: Final = 5


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Images by their paths, and their classes.

    Args:
        paths: each sample's file.
        labels: (N,), int64.
        class_names: the classes' names, by label.
        side: the pixels that every image is scaled and cropped to.
        fingerprint: the CRC-32 of paths, sizes in bytes and labels.
        colours: the mean and deviation to normalise with.
    """

    paths: Sequence[Path]
    labels: Tensor
    class_names: tuple[str, ...]
    side: int
    fingerprint: int
    colours: Colours = IMAGENET_COLOURS

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.paths)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def image(self, row: int) -> Image:
        """The image of a row, as it is.

        Raises:
            DataError: it cannot be decoded; names its path.
        """
        return _open(self.paths[row])

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 3, side, side), float32, normalised.

        Evaluation scales the shorter side and crops the middle. Training crops 8 to
        100 % of the area at 3:4 to 4:3, scales that, and mirrors half of the images.

        Raises:
            DataError: an image cannot be decoded; names its path.

        Source: Szegedy et al., arXiv:1409.4842, section 6 (the cut for training).
        """
        numbers: list[Sequence[float] | None] = [None] * len(rows)
        if draw is not None:
            numbers = draw.uniform(rows, _NUM_RANDOM).tolist()
        images = [
            _pixels(_open(self.paths[row]), self.side, random)
            for row, random in zip(rows.tolist(), numbers, strict=True)
        ]
        return self.colours.normalised(torch.stack(images))

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.labels[rows]


def load_image_folder(
    folder: Path, *, side: int, training: str = "train", validation: str = "val"
) -> tuple[ImageFolder, ImageFolder]:
    """Load the images for training and for validation.

    Args:
        folder: a folder with a folder per part, and in each a folder per class.
        side: the pixels that every image is scaled and cropped to.
        training: the name of the part to train on.
        validation: the name of the part to evaluate on.

    Raises:
        DataError: Pillow is not installed, a folder is missing, a class has no image,
            or the validation has a class that the training has not.
    """
    check_pillow()
    names = _classes(folder, training)
    others = [name for name in _classes(folder, validation) if name not in names]
    if others:
        raise DataError(
            f"{folder / validation} has classes that {folder / training} has not: "
            f"{', '.join(others)}. {_origin(training).advice}"
        )
    first = _read(folder, training, names, side)
    return first, _read(folder, validation, names, side)


def _origin(part: str) -> DataOrigin:
    return DataOrigin(
        "an image folder",
        "wherever your images are",
        f"FOLDER/{part}/CLASS/IMAGE, with images that end in {', '.join(ENDINGS)}",
    )


def _classes(folder: Path, part: str) -> tuple[str, ...]:
    inside = folder / part
    if not inside.is_dir():
        raise DataError(f"{inside} is no folder: {_origin(part).advice}")
    names = sorted(each.name for each in inside.iterdir() if each.is_dir())
    if not names:
        raise DataError(f"{inside} has no folder of a class: {_origin(part).advice}")
    return tuple(names)


def _read(folder: Path, part: str, names: tuple[str, ...], side: int) -> ImageFolder:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        inside = folder / part / name
        if not inside.is_dir():  # validation need not have every class
            continue
        found = sorted(
            path for path in inside.iterdir() if path.suffix.lower() in ENDINGS
        )
        if not found:
            raise DataError(f"{inside} has no image: {_origin(part).advice}")
        paths += found
        labels += [label] * len(found)
    entries = [
        (str(path.relative_to(folder)), path.stat().st_size, label)
        for path, label in zip(paths, labels, strict=True)
    ]
    digest = zlib.crc32(repr((side, entries)).encode())
    return ImageFolder(paths, torch.tensor(labels), names, side, digest)


def check_pillow() -> None:
    """Check that Pillow is installed.

    Raises:
        DataError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError(
            "images are decoded by Pillow, which is not installed: "
            "pip install 'hocket[vision]'"
        ) from error


def _open(path: Path) -> Image:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be decoded as an image ({error}): mend it, or take it out "
            "of the folder"
        ) from error


def _pixels(image: Image, side: int, random: Sequence[float] | None) -> Tensor:
    """(3, side, side), bytes."""
    from PIL.Image import Resampling

    box = _middle(image, side) if random is None else _anywhere(image, random)
    scaled = image.resize((side, side), Resampling.BILINEAR, box=box)
    # A copy: what numpy sees of an image cannot be written to.
    pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1)
    return pixels.flip(-1) if random is not None and random[4] < 0.5 else pixels


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _middle(image: Image, side: int) -> Box:
    """Return a square in the middle, a little smaller than the shorter side."""
    scaled = ceil(side * _MARGIN)
    edge = min(image.size) * side / scaled
    left, top = ((length - edge) / 2 for length in image.size)
    return left, top, left + edge, top + edge


def _anywhere(image: Image, random: Sequence[float]) -> Box:
    """Return a random crop, clipped to the image."""
    width, height = image.size
    area = (_LEAST_AREA + random[0] * (1 - _LEAST_AREA)) * width * height
    ratio = (3 / 4) * (16 / 9) ** random[1]
    box_width = min(width, sqrt(area * ratio))
    box_height = min(height, sqrt(area / ratio))
    left = random[2] * (width - box_width)
    top = random[3] * (height - box_height)
    return left, top, left + box_width, top + box_height
