"""STL-10: 96 x 96 colour images, most of them without a label, in the binary files.

    stl10_binary/
      train_X.bin  train_y.bin      500 images of each of ten classes
      test_X.bin   test_y.bin       800 of each
      unlabeled_X.bin               100,000, of these and of other classes
      class_names.txt

An image is 27,648 bytes: its red pixels, then the green, then the blue, each column by
column. A label is one byte, from 1 to 10. Files may hold fewer images than the official
ones. Images stay in their file, and are read when a batch asks for them.

Source: Coates, Lee, Ng, "An analysis of single-layer networks in unsupervised feature
learning", AISTATS 2011; https://cs.stanford.edu/~acoates/stl10.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.images.image_tensors import Colours, Variation
from hocket.recipes.data.origin import DataOrigin
from hocket.run.data.samples import EpochRandom

SIDE: Final = 96  # pixels
UNLABELED: Final = -1  # the label of an image that has none
COLOURS: Final = Colours((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))

_NUM_CHANNELS: Final = 3
_IMAGE_BYTES: Final = _NUM_CHANNELS * SIDE * SIDE
_NUM_CLASSES: Final = 10
_NUM_COMPARED: Final = 256  # images that the fingerprint reads
_ORIGIN: Final = DataOrigin(
    "STL-10",
    "https://cs.stanford.edu/~acoates/stl10",
    "the folder stl10_binary, with train_X.bin, train_y.bin, test_X.bin, test_y.bin, "
    "class_names.txt and, to train without labels, unlabeled_X.bin",
)


@dataclass(frozen=True, slots=True)
class Stl10:
    """Images of one file, and their classes.

    Args:
        path: the images' file.
        labels: (N,), int64, from 0; -1 without a label.
        class_names: the classes' names, by label.
        fingerprint: the CRC-32 of the labels and of some images.
        variation: what images become.
    """

    path: Path
    labels: Tensor
    class_names: tuple[str, ...]
    fingerprint: int
    variation: Variation

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def colours(self) -> Colours:
        """The mean and deviation to normalise with."""
        return COLOURS

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def images(self, rows: Tensor) -> Tensor:
        """(B, 3, 96, 96), bytes, row by row."""
        found = _mapped(self.path, len(self.labels))[rows.numpy()]
        return torch.from_numpy(found).transpose(2, 3).contiguous()

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 3, side, side), float32, normalised; moved and mirrored by the draw."""
        images = self.colours.normalised(self.images(rows))
        return self.variation.of(images, rows, draw)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.labels[rows]


def load_stl10(
    folder: Path,
    *,
    unlabeled: bool = False,
    shift_pixels: int = 12,
    flip: bool = True,
    side: int = SIDE,
) -> tuple[Stl10, Stl10]:
    """Load STL-10's images for training and for test.

    Args:
        folder: `stl10_binary`.
        unlabeled: train on the images without a label.
        shift_pixels: the largest shift of a training image.
        flip: whether half of the training images are mirrored.
        side: the pixels that images are scaled to, after that.

    Raises:
        DataError: a file is missing, holds no whole number of images, or has another
            number of labels, or a label that is out of range.
    """
    names = tuple(_ORIGIN.text(_ORIGIN.find(folder, "class_names.txt")).split())
    if len(names) != _NUM_CLASSES:
        raise DataError(
            f"{folder / 'class_names.txt'} names {len(names)} classes where "
            f"{_NUM_CLASSES} are due: {_ORIGIN.advice}"
        )
    variation = Variation(shift_pixels, flip, side)
    found = []
    for part in ("unlabeled" if unlabeled else "train", "test"):
        path = _ORIGIN.find(folder, f"{part}_X.bin")
        num_images = _count(path)
        labels = torch.full((num_images,), UNLABELED)
        if part != "unlabeled":
            labels = _read_labels(_ORIGIN.find(folder, f"{part}_y.bin"), num_images)
        digest = _digest(path, labels)
        found.append(Stl10(path, labels, names, digest, variation))
    training, test = found
    return training, test


def _count(path: Path) -> int:
    num_images, rest = divmod(path.stat().st_size, _IMAGE_BYTES)
    if rest or not num_images:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes, which is no multiple of the "
            f"{_IMAGE_BYTES} of an image, or 0: {_ORIGIN.advice}"
        )
    return num_images


def _read_labels(path: Path, num_images: int) -> Tensor:
    """(N,), int64, from 0."""
    labels = torch.tensor(list(_ORIGIN.read(path)))
    if len(labels) != num_images:
        raise DataError(
            f"{path} has {len(labels)} labels for {num_images} images: {_ORIGIN.advice}"
        )
    for record in ((labels < 1) | (labels > _NUM_CLASSES)).nonzero().flatten().tolist():
        raise DataError(
            f"{path}, record {record}: label {labels[record]} is not from 1 to "
            f"{_NUM_CLASSES}. {_ORIGIN.advice}"
        )
    return labels - 1


def _digest(path: Path, labels: Tensor) -> int:
    """Return the CRC-32 of the labels, and of images at equal distances."""
    images = _mapped(path, len(labels))
    digest = zlib.crc32(labels.numpy().tobytes())
    for image in images[:: max(1, len(images) // _NUM_COMPARED)]:
        digest = zlib.crc32(image.tobytes(), digest)
    return digest


def _mapped(path: Path, num_images: int) -> NDArray[np.uint8]:
    """(N, 3, column, row): the file's bytes, which are read when they are looked at."""
    shape = (num_images, _NUM_CHANNELS, SIDE, SIDE)
    return np.memmap(path, dtype=np.uint8, mode="r", shape=shape)
