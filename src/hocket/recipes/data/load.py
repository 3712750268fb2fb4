"""Loads a recipe's data: the digits, or what a function returns."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from hocket.errors import DataError, RecipeError
from hocket.recipes.config.data_settings import DigitsSettings
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.data.digits import load_digits
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
        "hocket.run.data.samples.Samples, or have a length and give "
        "(inputs, targets) for an index"
    )


def whole_of(samples: Samples) -> Any:
    """Return the data set that a function has returned, also of its first samples."""
    return samples.samples if isinstance(samples, FirstSamples) else samples
