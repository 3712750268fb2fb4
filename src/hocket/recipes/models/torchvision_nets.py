"""Makes torchvision's classifiers; DenseNets and MobileNets of any growth and width.

Batch normalization takes its means over a microbatch, not over the whole batch.

Source: Huang et al., arXiv:1608.06993; Howard et al., arXiv:1905.02244.
"""

from __future__ import annotations

from typing import Final, assert_never

from torch import nn

from hocket.errors import MissingPackageError, RecipeError
from hocket.nearest import nearest
from hocket.recipes.config.model_settings import (
    DensenetSettings,
    MobilenetSettings,
    TorchvisionSettings,
)

_BLOCKS: Final = {
    121: (6, 12, 24, 16),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
}


def make_torchvision_net(
    settings: DensenetSettings | MobilenetSettings | TorchvisionSettings,
    num_classes: int,
) -> nn.Module:
    """Make a model from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: which, and its sizes.
        num_classes: K.

    Raises:
        MissingPackageError: torchvision is not installed.
        RecipeError: it has no such classifier.
    """
    match settings:
        case DensenetSettings():
            return make_densenet(settings, num_classes)
        case MobilenetSettings():
            return make_mobilenet(settings, num_classes)
        case TorchvisionSettings():
            return make_classifier(settings.name, num_classes)
        case _:
            assert_never(settings)


def make_densenet(settings: DensenetSettings, num_classes: int) -> nn.Module:
    """Make a model from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: its depth and growth; the stem has twice the growth's channels, as
            the paper's networks for ImageNet have.
        num_classes: K.

    Raises:
        MissingPackageError: torchvision is not installed.
    """
    try:
        from torchvision.models import DenseNet
    except ImportError as error:
        raise _missing("DenseNet", error) from error
    model: nn.Module = DenseNet(
        growth_rate=settings.growth_rate,
        block_config=_BLOCKS[settings.depth],
        num_init_features=2 * settings.growth_rate,
        num_classes=num_classes,
    )
    return model


def make_mobilenet(settings: MobilenetSettings, num_classes: int) -> nn.Module:
    """Make a MobileNetV3-Large from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: how wide it is.
        num_classes: K.

    Raises:
        MissingPackageError: torchvision is not installed.
    """
    try:
        from torchvision.models import mobilenet_v3_large
    except ImportError as error:
        raise _missing("MobileNetV3", error) from error
    model: nn.Module = mobilenet_v3_large(
        num_classes=num_classes, width_mult=settings.width_multiplier
    )
    return model


def make_classifier(name: str, num_classes: int) -> nn.Module:
    """Make a model by its name, from images (B, 3, S, S) to class scores (B, K).

    Args:
        name: torchvision's name for it.
        num_classes: K.

    Raises:
        MissingPackageError: torchvision is not installed.
        RecipeError: it has no such classifier.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise _missing(name, error) from error
    names = models.list_models(module=models)
    if name not in names:
        raise RecipeError(f"model.name {name!r} is unknown: {nearest(name, names)}")
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes)
    return model


def _missing(name: str, error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        f"{name} comes with torchvision, which is not installed or does not load "
        f"({error}): pip install 'hocket[vision]'"
    )
