"""Networks of convolutions, for small images."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torchvision.models import mobilenet_v3_small
from torchvision.models.densenet import DenseNet

from bench.zoo.architecture import Architecture, Draw
from hocket.model.trace.per_sample import PerSample
from tests.run.support.small_models import SmallResNet, classes
from tests.zoo.unet import UNet, pixels
from tests.zoo.vision import ResNeXt, parts, retinanet


def densenet() -> nn.Module:
    """torchvision's, three blocks of four layers."""
    return DenseNet(
        growth_rate=24,
        block_config=(4, 4, 4),
        num_init_features=48,
        bn_size=4,
        num_classes=3,
    )


def _images(num_channels: int, side: int) -> Draw:
    def draw(count: int, rng: torch.Generator) -> tuple[Any, Any]:
        x = torch.randn(count, num_channels, side, side, generator=rng)
        return x, torch.randint(3, (count,), generator=rng)

    return draw


def _masks(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 1, 64, 64, generator=rng)
    return x, torch.randint(2, (count, 64, 64), generator=rng)


def _scenes(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    """Images of different sizes, each with one to three boxes."""
    images, targets = PerSample(), PerSample()
    for _ in range(count):
        height, width = torch.randint(48, 80, (2,), generator=rng).tolist()
        num_boxes = int(torch.randint(1, 4, (), generator=rng))
        corner = 20 * torch.rand(num_boxes, 2, generator=rng)
        size = 16 + 12 * torch.rand(num_boxes, 2, generator=rng)
        labels = torch.randint(3, (num_boxes,), generator=rng)
        images.append(torch.rand(3, height, width, generator=rng))
        boxes = torch.cat([corner, corner + size], 1)
        targets.append({"boxes": boxes, "labels": labels})
    return {"images": images, "targets": targets}, None


ARCHITECTURES: Final = {
    "resnet": Architecture(lambda: SmallResNet(32), classes, _images(2, 32), 64),
    "resnext": Architecture(lambda: ResNeXt(32), classes, _images(3, 32), 32),
    "densenet": Architecture(densenet, classes, _images(3, 64), 32),
    "mobilenetv3": Architecture(
        lambda: mobilenet_v3_small(num_classes=3), classes, _images(3, 64), 32
    ),
    "unet": Architecture(lambda: UNet(8), pixels, _masks, 24),
    "retinanet": Architecture(
        lambda: retinanet((128, 256, 256), 16, 64),
        parts,
        _scenes,
        24,
        cut=("pyramid",),
    ),
}
