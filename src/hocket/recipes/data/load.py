"""Calls the reader that a recipe's kind of data names."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hocket.errors import DataError, RecipeError
from hocket.recipes.config.data_settings import (
    DataFunctionSettings,
    DataSettings,
    DigitsSettings,
    FileSettings,
    GlueSettings,
    MaskedTextSettings,
    SquadSettings,
    TextSettings,
)
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.data.digits import load_digits
from hocket.recipes.data.glue import GlueTask, load_glue
from hocket.recipes.data.masked_text import load_masked_text
from hocket.recipes.data.squad import load_squad
from hocket.recipes.user_functions import call_function
from hocket.run.data.batch import digest
from hocket.run.data.samples import EpochRandom, Samples, first_samples


# Loads the user's own data: torch's map-style datasets, returned by a function.
class Dataset(Protocol):
    """A map-style dataset: has a length, and returns `(inputs, targets)` by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class DatasetSamples:
    """A dataset's samples, collated as torch's DataLoader does it.

    A dataset's own random augmentation differs between workers. So a dataset should
    augment nothing, or be `hocket.run.data.samples.Samples`.

    Args:
        dataset: the same on every worker.
    """

    def __init__(self, dataset: Dataset) -> None:
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


def load_user_data(settings: DataFunctionSettings) -> tuple[Samples, Samples]:
    """Call a function that returns samples for training and for evaluation.

    Args:
        settings: the function and its arguments. It returns a pair; both are
            `hocket.run.data.samples.Samples`, or else have a length and return
            `(inputs, targets)` for an index, as torch's datasets do.

    Raises:
        RecipeError: it cannot be had, or returns something else.
    """
    name = settings.function
    pair = call_function("data", settings)
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


# Reads a text file as bytes, in windows: each byte's target is the next byte.
#
#     file     T h e   c a t   s a t   d o w n .
#     window   └─ inputs ──┘
#                └─ targets ─┘
#
# Windows follow each other without overlap; the last part of the file is for
# evaluation.
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


def load_samples(recipe: Recipe) -> tuple[Samples, Samples]:
    """Load the samples for training and for evaluation.

    Raises:
        DataError: the data are missing, malformed, or too few to be split.
        RecipeError: the user's function cannot be imported, or returns no data.
    """
    training, evaluation = _load(recipe.data)
    if isinstance(recipe.data, FileSettings):
        most = recipe.data.max_samples
        return first_samples(training, most), first_samples(evaluation, most)
    return training, evaluation


def _load(settings: DataSettings) -> tuple[Samples, Samples]:
    match settings:
        case DigitsSettings():
            return load_digits(settings.test_fraction, settings.shift_probability)
        case DataFunctionSettings():
            return load_user_data(settings)
        case TextSettings():
            return load_text(
                Path(settings.path),
                settings.window_bytes,
                settings.validation_fraction,
            )
        case GlueSettings() | SquadSettings() | MaskedTextSettings():
            return _load_word_pieces(settings)
        case _:
            assert_never(settings)


def _load_word_pieces(
    settings: GlueSettings | SquadSettings | MaskedTextSettings,
) -> tuple[Samples, Samples]:
    path, words = Path(settings.path), settings.vocabulary
    common: dict[str, Any] = {
        "num_tokens": settings.num_tokens,
        "vocabulary": None if words is None else Path(words),
        "num_entries": settings.num_pieces,
    }
    match settings:
        case MaskedTextSettings(validation_fraction=fraction, mask_share=share):
            return load_masked_text(
                path, validation_fraction=fraction, mask_share=share, **common
            )
        case SquadSettings(num_question_tokens=most, stride=stride):
            return load_squad(path, num_question_tokens=most, stride=stride, **common)
        case GlueSettings(task=task):
            return load_glue(GlueTask(task), path, **common)
        case _:
            assert_never(settings)
