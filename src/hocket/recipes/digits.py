"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, ten classes.

They come with scikit-learn and need no download. Source: E. Alpaydin, C. Kaynak,
"Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from hocket.errors import DataError
from hocket.recipes.samples import Batch

NUM_CLASSES: Final = 10
NUM_CHANNELS: Final = 1
MAX_PIXEL: Final = 16.0
BLANK: Final = -1.0  # a pixel without ink, normalised

# The split is a fact about the data, the same for every run and seed.
SPLIT_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Digits:
    """Images and their classes.

    Args:
        images: (N, 1, 8, 8), from -1 (blank) to 1 (ink).
        labels: (N,), 0 to 9.
        shift_probability: of moving a training image by up to a pixel.
    """

    images: Tensor
    labels: Tensor
    shift_probability: float = 0.0

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.labels)

    def take(self, rows: Tensor) -> Batch:
        """Images and labels of these rows."""
        return self.images[rows], self.labels[rows]

    def take_varied(self, rows: Tensor, generator: torch.Generator) -> Batch:
        """The same, some of the images moved."""
        images, labels = self.take(rows)
        return shift(images, self.shift_probability, generator), labels


def load_digits(
    test_fraction: float, shift_probability: float
) -> tuple[Digits, Digits]:
    """The digits for training and for test; of each class the same share.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # takes a second
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'hocket[recipes]'"
        ) from error
    pixels, classes = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, NUM_CHANNELS, 8, 8)
    labels = torch.tensor(classes, dtype=torch.int64)
    images = images * (2 / MAX_PIXEL) + BLANK
    test, train = split_rows(labels, test_fraction)
    return (
        Digits(images[train], labels[train], shift_probability),
        Digits(images[test], labels[test]),
    )


def split_rows(labels: Tensor, test_fraction: float) -> tuple[Tensor, Tensor]:
    """Rows for test and for training, in order; each class split by the fraction."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        test[shuffled[: round(test_fraction * len(rows))]] = True
    return test.nonzero().flatten(), (~test).nonzero().flatten()


def shift(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Move some images by -1, 0 or 1 pixels in each direction, blank moving in.

    Args:
        images: (N, C, S, S).
        probability: of an image to be moved; one in nine of these stays in place.
        generator: of the random numbers.
    """
    num_images, _, side, _ = images.shape
    offsets = torch.randint(0, 3, (num_images, 2), generator=generator)
    moves = torch.rand(num_images, generator=generator) < probability
    offsets = torch.where(moves[:, None], offsets, 1)
    padded = functional.pad(images, (1, 1, 1, 1), value=BLANK)
    pixel = torch.arange(side)
    rows = (offsets[:, :1] + pixel)[:, :, None]
    columns = (offsets[:, 1:] + pixel)[:, None, :]
    which = torch.arange(num_images)[:, None, None]
    return padded[which, :, rows, columns].permute(0, 3, 1, 2)
