"""Loads a recipe's data: the digits, or what a function returns."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from hocket.core.timelines.arrays import Floats
from hocket.errors import DataError, RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.sections import DigitsSettings
from hocket.recipes.user_functions import call_function
from hocket.run.data.batch import digest
from hocket.run.data.samples import EpochRandom, FirstSamples, Samples, first_samples


class DatasetSamples:
    """A dataset's samples, collated as torch's DataLoader does it.

    A dataset's own random augmentation differs between workers. So a dataset should
    augment nothing, or be `hocket.run.data.samples.Samples`.

    Args:
        dataset: has a length, and returns `(inputs, targets)` by index; the same on
            every worker.
    """

    def __init__(self, dataset: Sequence[Any]) -> None:
        self._dataset = dataset

    @property
    def num_samples(self) -> int:
        """The dataset's length."""
        return len(self._dataset)

    @cached_property
    def fingerprint(self) -> int:
        """The CRC-32 of its length, its first and its last sample."""
        if not self.num_samples:
            return 0
        ends = (self._pair(0), self._pair(self.num_samples - 1))
        return zlib.crc32(repr((self.num_samples, *map(digest, ends))).encode())

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """The model's inputs of several samples."""
        del draw
        return self._collated(rows, 0)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """The targets of the same samples."""
        del draw
        return self._collated(rows, 1)

    def _collated(self, rows: Tensor, side: int) -> Any:
        parts = [self._pair(row)[side] for row in rows.tolist()]
        try:
            return default_collate(parts)
        except (RuntimeError, TypeError) as error:
            raise DataError(
                f"samples {', '.join(map(str, rows.tolist()[:8]))} ... of the data set "
                f"cannot be put together to a batch: {error}"
            ) from error

    def _pair(self, row: int) -> tuple[Any, Any]:
        sample = self._dataset[row]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(
                f"sample {row} of the data set is a {type(sample).__name__}: it must "
                "be a pair (inputs, targets)"
            )
        return sample[0], sample[1]


@dataclass(frozen=True, slots=True)
class CastSamples(FirstSamples):
    """The same, with inputs that are floating-point numbers in another type.

    Args:
        dtype: the type.
    """

    dtype: torch.dtype

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """See `Samples.inputs`."""
        return cast_floats(self.samples.inputs(rows, draw), self.dtype)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return the same with tensors of floating-point numbers in another type."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, values)


def load_samples(recipe: Recipe) -> tuple[Samples, Samples]:
    """Load the samples for training and for evaluation.

    A function returns a pair; both are `hocket.run.data.samples.Samples`, or else have
    a length and return `(inputs, targets)` for an index, as torch's datasets do.

    Raises:
        DataError: the data are missing, malformed, or too few to be split.
        RecipeError: the user's function cannot be imported, or returns no data.
    """
    settings = recipe.data
    if isinstance(settings, DigitsSettings):
        return load_digits(settings.test_fraction, settings.shift_probability)
    name, pair = settings.function, call_function("data", settings)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise RecipeError(
            f"{name} returned {type(pair).__name__}: it must return a pair, the data "
            "to train on and the data to evaluate on"
        )
    most = settings.max_samples
    training, evaluation = (first_samples(_samples(name, part), most) for part in pair)
    return training, evaluation


def _samples(name: str, part: Any) -> Samples:
    if hasattr(part, "num_samples") and hasattr(part, "fingerprint"):
        own: Samples = part
        return own
    if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return DatasetSamples(part)
    raise RecipeError(
        f"{name} returned a pair with {type(part).__name__} in it: it must be "
        "hocket.Samples, or have a length and give "
        "(inputs, targets) for an index"
    )


def whole_of(samples: Samples) -> Any:
    """Return the data set that a function has returned, also of its first samples."""
    while isinstance(samples, FirstSamples):
        samples = samples.samples
    return samples


# scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, ten classes.
#
# They come with scikit-learn and need no download. Source: E. Alpaydin, C. Kaynak,
# "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
MAX_PIXEL: Final = 16.0
BLANK: Final = -1.0  # a pixel without ink, normalised

# The split is a fact about the data, the same for every run and seed.
SPLIT_SEED: Final = 0


@dataclass(frozen=True)
class Digits:
    """Images and their classes.

    Args:
        images: (N, 1, 8, 8), from -1 (blank) to 1 (ink).
        labels: (N,), 0 to 9.
        shift_probability: the probability that a training image is shifted by up to a
            pixel.
        num_channels: channels of an image.
        side: pixels of an image's side.
        num_classes: labels are below it.
    """

    images: Tensor
    labels: Tensor
    shift_probability: float = 0.0
    num_channels: int = 1
    side: int = 8
    num_classes: int = 10

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> int:
        """The CRC-32 of images and labels."""
        label_digest = zlib.crc32(self.labels.numpy().tobytes())
        return zlib.crc32(self.images.numpy().tobytes(), label_digest)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 1, 8, 8), float32; `draw` shifts some of them."""
        images = self.images[rows]
        if draw is None:
            return images
        return shift(images, self.shift_probability, draw.uniform(rows, 3))

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.labels[rows]


def load_digits(
    test_fraction: float, shift_probability: float
) -> tuple[Digits, Digits]:
    """Load the digits for training and for test; of each class the same share.

    Raises:
        DataError: scikit-learn is not installed.
    """
    table = _table()
    images = torch.tensor(table[:, :-1], dtype=torch.float32)
    images = images.view(-1, 1, 8, 8)
    labels = torch.tensor(table[:, -1], dtype=torch.int64)
    images = images * (2 / MAX_PIXEL) + BLANK
    test, train = split_rows(labels, test_fraction)
    return (
        Digits(images[train], labels[train], shift_probability),
        Digits(images[test], labels[test]),
    )


def _table() -> Floats:
    """Return (N, 65): the pixels of each image and its class.

    Read from scikit-learn's file, since importing scikit-learn takes seconds in every
    worker.
    """
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'hocket[recipes]'"
        )
    (folder,) = found.submodule_search_locations
    return np.loadtxt(Path(folder, "datasets/data/digits.csv.gz"), delimiter=",")


def split_rows(labels: Tensor, test_fraction: float) -> tuple[Tensor, Tensor]:
    """Return sorted rows for test and for training; splits each class separately."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        test[shuffled[: round(test_fraction * len(rows))]] = True
    return test.nonzero().flatten(), (~test).nonzero().flatten()


def shift(images: Tensor, probability: float, uniform_N3: Tensor) -> Tensor:
    """Move some images by -1, 0 or 1 pixels in each direction, blank moving in.

    Args:
        images: (N, C, S, S).
        probability: the probability of a shift; one in nine of these is by 0 pixels.
        uniform_N3: random numbers in [0, 1): down, right, and whether to shift at all.
    """
    num_images, _, side, _ = images.shape
    offsets = (uniform_N3[:, :2] * 3).long()
    moves = uniform_N3[:, 2] < probability
    offsets = torch.where(moves[:, None], offsets, 1)
    padded = functional.pad(images, (1, 1, 1, 1), value=BLANK)
    pixel = torch.arange(side)
    rows = (offsets[:, :1] + pixel)[:, :, None]
    columns = (offsets[:, 1:] + pixel)[:, None, :]
    which = torch.arange(num_images)[:, None, None]
    return padded[which, :, rows, columns].permute(0, 3, 1, 2).contiguous()
