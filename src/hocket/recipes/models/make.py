"""Makes a recipe's model; its seed determines the weights."""

from __future__ import annotations

from typing import Any, Final, assert_never

import torch
from torch import nn

from hocket.errors import RecipeError
from hocket.recipes.config.model_settings import ModelFunctionSettings, VitSettings
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.data.load import whole_of
from hocket.recipes.models.transformer import Blocks
from hocket.recipes.models.vit import Pooling, VisionTransformer
from hocket.recipes.user_functions import call_function
from hocket.run.data.samples import Samples
from hocket.signatures import values_of

_IMAGES: Final = ("num_channels", "side", "num_classes")  # what a vit asks of data


def make_model(recipe: Recipe, training: Samples) -> nn.Module:
    """Make a newly initialised model.

    Args:
        recipe: the recipe.
        training: the samples to train on, for the numbers of classes and words.

    Raises:
        RecipeError: the user's function returns no module.
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: the package that has the model is not installed.
    """
    torch.manual_seed(recipe.training.seed)
    whole = whole_of(training)
    match recipe.model:
        case VitSettings() as vit:
            return _vit(vit, whole)
        case ModelFunctionSettings() as own:
            return _own_model(own, whole)
        case _:
            assert_never(recipe.model)


def _vit(settings: VitSettings, images: Any) -> nn.Module:
    """Make a vision transformer of the images' sizes.

    Raises:
        RecipeError: the data are no images, or patches do not fill them.
    """
    if not all(hasattr(images, name) for name in _IMAGES):
        raise RecipeError(
            "model.kind 'vit' reads images: the function of [data] must return samples "
            "with num_channels, side (pixels) and num_classes"
        )
    if images.side % settings.patch_size:
        raise RecipeError(
            f"model.patch_size {settings.patch_size} does not divide the images' side "
            f"of {images.side} pixels"
        )
    return VisionTransformer(
        image_side=images.side,
        num_channels=images.num_channels,
        num_classes=images.num_classes,
        patch_size=settings.patch_size,
        pooling=Pooling(settings.pooling),
        blocks=Blocks(**values_of(Blocks, settings)),
    )


def _own_model(settings: ModelFunctionSettings, samples: Samples) -> nn.Module:
    model = call_function("model", settings, data=samples)
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"{settings.function} returned {type(model).__name__}: it must return a "
            "torch.nn.Module"
        )
    return model
