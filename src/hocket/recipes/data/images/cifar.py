"""CIFAR-10 and CIFAR-100: 32 x 32 colour images, in the official "python version".

    cifar-10-batches-py/              cifar-100-python/
      data_batch_1 ... data_batch_5     train
      test_batch                        test
      batches.meta                      meta

The files are pickles, which `restricted_pickle.py` reads without running code. Files
may hold fewer images than the official 10,000.

Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.images.cifar_files import (
    CIFAR10,
    CIFAR100,
    CIFAR100_COARSE,
    NUM_CHANNELS,
    SIDE,
    CifarLayout,
    read,
    read_class_names,
    read_images,
    read_labels,
)
from hocket.recipes.data.images.image_tensors import Colours, Variation
from hocket.run.data.samples import EpochRandom


class Cifar:
    """Images and their classes; a worker reads images when it first needs them.

    Args:
        paths: the files, in order.
        layout: their keys and classes.
        class_names: the classes' names, by label.
        variation: what images become.

    Attributes:
        labels: (N,), int64.
        fingerprint: the CRC-32 of the files' content.

    Raises:
        DataError: a file is missing or malformed, or a label is out of range.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        layout: CifarLayout,
        class_names: tuple[str, ...],
        variation: Variation,
    ) -> None:
        self.class_names = class_names
        self.variation = variation
        self._paths = paths
        self._layout = layout
        self._digests: list[int] = []
        self._kept: dict[int, Tensor] = {}
        labels: list[int] = []
        ends: list[int] = []
        for path in paths:
            content, digest = read(path, layout)
            num_images = len(read_images(path, content, layout))
            labels += read_labels(path, content, layout, num_images)
            ends.append(len(labels))
            self._digests.append(digest)
        self.labels = torch.tensor(labels)
        self._ends = torch.tensor(ends)
        self.fingerprint = zlib.crc32(repr(self._digests).encode())

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self._layout.num_classes

    @property
    def colours(self) -> Colours:
        """The mean and deviation to normalise with."""
        return self._layout.colours

    def __copy__(self) -> Cifar:
        """Return a copy without cached images."""
        other = object.__new__(Cifar)
        other.__dict__.update(self.__dict__, _kept={})
        return other

    def images(self, rows: Tensor) -> Tensor:
        """(B, 3, 32, 32), bytes; a file is read again when first asked for."""
        images = torch.empty(len(rows), NUM_CHANNELS, SIDE, SIDE, dtype=torch.uint8)
        files = torch.bucketize(rows, self._ends, right=True)
        for file in files.unique().tolist():
            here = files == file
            begin = self._ends[file - 1] if file else 0
            images[here] = self._images_of(file)[rows[here] - begin]
        return images

    def _images_of(self, file: int) -> Tensor:
        if file not in self._kept:
            path, layout = self._paths[file], self._layout
            content, digest = read(path, layout)
            if digest != self._digests[file]:
                raise DataError(
                    f"{path} has changed since it was checked: leave the files as "
                    "they are while training"
                )
            images = torch.tensor(read_images(path, content, layout))
            self._kept[file] = images.view(-1, NUM_CHANNELS, SIDE, SIDE)
        return self._kept[file]

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 3, side, side), float32, normalised; moved and mirrored by the draw."""
        images = self.colours.normalised(self.images(rows))
        return self.variation.of(images, rows, draw)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.labels[rows]


def load_cifar10(
    folder: Path, *, shift_pixels: int = 4, flip: bool = True, side: int = SIDE
) -> tuple[Cifar, Cifar]:
    """Load CIFAR-10's images for training and for test; see `Cifar`.

    Args:
        folder: `cifar-10-batches-py`.
        shift_pixels: the largest shift of a training image.
        flip: whether half of the training images are mirrored.
        side: the pixels that images are scaled to, after that.

    Raises:
        DataError: a file is missing or malformed, or a label is out of range; names
            the file, the record, and where to get the official ones.
    """
    return _load(folder, CIFAR10, Variation(shift_pixels, flip, side))


def load_cifar100(
    folder: Path,
    *,
    shift_pixels: int = 4,
    flip: bool = True,
    side: int = SIDE,
    coarse: bool = False,
) -> tuple[Cifar, Cifar]:
    """Load CIFAR-100's images for training and for test; see `Cifar`.

    Args:
        folder: `cifar-100-python`.
        shift_pixels: the largest shift of a training image.
        flip: whether half of the training images are mirrored.
        side: the pixels that images are scaled to, after that.
        coarse: classify the 20 groups of classes, not the 100 classes.

    Raises:
        DataError: as `load_cifar10`.
    """
    layout = CIFAR100_COARSE if coarse else CIFAR100
    return _load(folder, layout, Variation(shift_pixels, flip, side))


def _load(
    folder: Path, layout: CifarLayout, variation: Variation
) -> tuple[Cifar, Cifar]:
    names = read_class_names(layout.origin.find(folder, layout.meta), layout)
    training, test = (
        Cifar(
            tuple(layout.origin.find(folder, name) for name in part),
            layout,
            names,
            variation,
        )
        for part in (layout.training, layout.test)
    )
    return training, test
