"""Calls the reader that a recipe's kind of data names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_never

from hocket.recipes.config.data_settings import (
    Cifar10Settings,
    Cifar100Settings,
    DataFunctionSettings,
    DataSettings,
    DigitsSettings,
    FileSettings,
    FlowersSettings,
    GlueSettings,
    ImageFolderSettings,
    MaskedTextSettings,
    SquadSettings,
    Stl10Settings,
    TextSettings,
)
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.data.digits import load_digits
from hocket.recipes.data.glue import GlueTask, load_glue
from hocket.recipes.data.images.cifar import load_cifar10, load_cifar100
from hocket.recipes.data.images.flowers import load_flowers
from hocket.recipes.data.images.image_folder import load_image_folder
from hocket.recipes.data.images.stl10 import load_stl10
from hocket.recipes.data.masked_text import load_masked_text
from hocket.recipes.data.squad import load_squad
from hocket.recipes.data.text import load_text
from hocket.recipes.data.user_data import load_user_data
from hocket.run.data.samples import Samples, first_samples


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
            return load_user_data(settings.function, settings.arguments)
        case TextSettings():
            return load_text(
                Path(settings.path),
                settings.window_bytes,
                settings.validation_fraction,
            )
        case GlueSettings() | SquadSettings() | MaskedTextSettings():
            return _load_word_pieces(settings)
        case _:
            return _load_images(settings)


def _load_images(
    settings: Cifar10Settings
    | Cifar100Settings
    | Stl10Settings
    | ImageFolderSettings
    | FlowersSettings,
) -> tuple[Samples, Samples]:
    path, side = Path(settings.path), settings.side
    match settings:
        case Cifar10Settings(shift_pixels=shift, flip=flip):
            return load_cifar10(path, shift_pixels=shift, flip=flip, side=side)
        case Cifar100Settings(shift_pixels=shift, flip=flip, coarse=coarse):
            return load_cifar100(
                path, shift_pixels=shift, flip=flip, side=side, coarse=coarse
            )
        case Stl10Settings(shift_pixels=shift, flip=flip, unlabeled=unlabeled):
            return load_stl10(
                path, shift_pixels=shift, flip=flip, side=side, unlabeled=unlabeled
            )
        case ImageFolderSettings(training=training, validation=validation):
            return load_image_folder(
                path, side=side, training=training, validation=validation
            )
        case FlowersSettings(with_validation=with_validation):
            return load_flowers(path, side=side, with_validation=with_validation)
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
