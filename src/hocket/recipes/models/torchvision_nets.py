"""Makes torchvision's classifiers, and some of its families at any size.

Batch normalization takes its means over a microbatch, not over the whole batch.

Source: Huang et al., arXiv:1608.06993 (DenseNet); Howard et al., arXiv:1905.02244
(MobileNetV3); Xie et al., arXiv:1611.05431 (ResNeXt; WPipe has the depths beyond 152).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torch import nn

from hocket.errors import MissingPackageError, RecipeError
from hocket.nearest import nearest
from hocket.recipes.config.model_settings import (
    ColourNetSettings,
    DensenetSettings,
    MobilenetSettings,
    ResnextSettings,
    TorchvisionSettings,
)
from hocket.recipes.config.resnext_depths import resnext_blocks
from hocket.recipes.models.pretrained import load_pretrained

_BLOCKS: Final = {
    121: (6, 12, 24, 16),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
}


def make_torchvision_net(
    settings: ColourNetSettings,
    num_classes: int,
) -> nn.Module:
    """Make a model from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: which, and its sizes; a DenseNet's stem has twice the growth's
            channels, as the paper's networks for ImageNet have.
        num_classes: K.

    Raises:
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: torchvision is not installed.
        RecipeError: it has no such classifier.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingPackageError(
            "the model comes with torchvision, which is not installed or does not load "
            f"({error}): pip install 'hocket[vision]'"
        ) from error
    model: nn.Module
    match settings:
        case DensenetSettings(growth_rate=growth_rate):
            model = models.DenseNet(
                growth_rate=growth_rate,
                block_config=_BLOCKS[settings.depth],
                num_init_features=2 * growth_rate,
                num_classes=num_classes,
            )
        case MobilenetSettings(width_multiplier=width):
            model = models.mobilenet_v3_large(num_classes=num_classes, width_mult=width)
        case ResnextSettings():
            model = models.ResNet(
                models.resnet.Bottleneck,
                list(resnext_blocks(settings.depth)),
                num_classes=num_classes,
                groups=settings.num_groups,
                width_per_group=settings.group_width,
            )
            if settings.pretrained is not None:
                load_pretrained(
                    model,
                    Path(settings.pretrained),
                    kind="a ResNeXt",
                    head="fc.",
                    source="download that file of a ResNeXt under torchvision's names "
                    "(https://huggingface.co/timm/resnext50_32x4d.tv_in1k) there",
                )
        case TorchvisionSettings(name=name):
            names = models.list_models(module=models)
            if name not in names:
                near = nearest(name, names)
                raise RecipeError(f"model.name {name!r} is unknown: {near}")
            model = models.get_model(name, weights=None, num_classes=num_classes)
        case _:
            raise AssertionError(f"{type(settings).__name__} is not made here")
    return model
