"""torchvision's networks that segment images, and one that returns more in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torchvision.models import googlenet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.models.segmentation import FCN, DeepLabV3, lraspp_mobilenet_v3_large
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead

from tests.model.support.stages_by_hand import Case


def segmenter(kind: Callable[..., nn.Module], head: Callable[..., nn.Module]) -> Case:
    """A dilated ResNet, with one head on its last features and one on those before."""
    dilated = [False, True, True]
    resnet = ResNet(Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=dilated)
    backbone = IntermediateLayerGetter(resnet, {"layer2": "aux", "layer3": "out"})
    return images(kind(backbone, head(1024, 3), FCNHead(512, 3)))


def images(model: nn.Module) -> Case:
    """Images of 32 x 32 pixels."""
    return Case(model.train(), (torch.randn(4, 3, 32, 32),), smallest=2)


CASES: Final[dict[str, Callable[[], Case]]] = {
    "deeplabv3": partial(segmenter, DeepLabV3, DeepLabHead),
    "fcn": partial(segmenter, FCN, FCNHead),
    "googlenet": lambda: images(
        googlenet(weights=None, num_classes=3, init_weights=False)
    ),
    "lraspp": lambda: images(
        lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    ),
}
