"""Makes torchvision's ResNeXt of any depth; weights are compatible with torchvision's.

Batch normalization takes its means over a microbatch, not over the whole batch.

Source: Xie et al., arXiv:1611.05431; the depths beyond 152 are WPipe's.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hocket.errors import MissingPackageError
from hocket.recipes.config.model_settings import ResnextSettings
from hocket.recipes.config.resnext_depths import resnext_blocks
from hocket.recipes.models.pretrained import load_pretrained


def make_resnext(settings: ResnextSettings, num_classes: int) -> nn.Module:
    """Make a model from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: its depth and widths.
        num_classes: K.

    Raises:
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: torchvision is not installed.
    """
    try:
        from torchvision.models.resnet import Bottleneck, ResNet
    except ImportError as error:
        raise MissingPackageError(
            "ResNeXt comes with torchvision, which is not installed or does not load "
            f"({error}): pip install 'hocket[vision]'"
        ) from error
    model: nn.Module = ResNet(
        Bottleneck,
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
    return model
