"""torchvision's networks, in small."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.densenet import DenseNet
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.resnet import Bottleneck
from torchvision.ops.misc import FrozenBatchNorm2d

from hocket.model.trace.per_sample import PerSample
from tests.run.support.small_models import Specimen, classes


class Prepare(nn.Module):
    """Images of different sizes, normalised and resized to one."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: list[Tensor]) -> Tensor:
        return cast(Tensor, self.transform(list(images))[0].tensors)


class Detect(nn.Module):
    """The end of torchvision's RetinaNet: its heads, its anchors and its losses."""

    compute_loss = RetinaNet.compute_loss

    def __init__(self, model: RetinaNet) -> None:
        super().__init__()
        self.transform = model.transform
        self.head = model.head
        self.anchor_generator = model.anchor_generator
        self.proposal_matcher = model.proposal_matcher

    def forward(
        self, features: dict[str, Tensor], images: list[Tensor], targets: list[Any]
    ) -> dict[str, Tensor]:
        batch, targets = self.transform(list(images), list(targets))
        levels = list(features.values())
        outputs = self.head(levels)
        anchors = self.anchor_generator(batch, levels)
        return cast(dict[str, Tensor], self.compute_loss(targets, outputs, anchors))


class Detector(nn.Module):
    """A RetinaNet whose parts are called one after the other.

    torchvision's own forward checks boxes and matches anchors between its parts, by the
    data. Here all of that is inside parts, so that the model can be cut between them.
    """

    def __init__(self, model: RetinaNet) -> None:
        super().__init__()
        self.prepare = Prepare(model.transform)
        self.body = model.backbone.body
        self.pyramid = model.backbone.fpn
        self.detect = Detect(model)

    def forward(self, images: list[Tensor], targets: list[Any]) -> dict[str, Tensor]:
        features = self.pyramid(self.body(self.prepare(images)))
        return cast(dict[str, Tensor], self.detect(features, images, targets))


class ResNeXt(nn.Module):
    """torchvision's blocks with grouped convolutions, in a narrow network."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        a, b, c, d = (factor * width for factor in (4, 8, 12, 16))
        self.stem = nn.Conv2d(3, a, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(a)
        self.blocks = nn.Sequential(
            bottleneck(a, b // 4), bottleneck(b, c // 4), bottleneck(c, d // 4)
        )
        self.head = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return cast(Tensor, self.head(x.mean((2, 3))))


class SmallBackbone(nn.Module):
    """Three sizes of features."""

    def __init__(self, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.layer1 = self._layer(3, widths[0])
        self.layer2 = self._layer(widths[0], widths[1])
        self.layer3 = self._layer(widths[1], widths[2])

    @staticmethod
    def _layer(num_in: int, num_out: int) -> nn.Sequential:
        conv = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(conv, FrozenBatchNorm2d(num_out), nn.ReLU())


def densenet() -> nn.Module:
    """torchvision's, three blocks of two layers."""
    return DenseNet(
        growth_rate=4,
        block_config=(2, 2, 2),
        num_init_features=8,
        bn_size=2,
        num_classes=3,
    )


def bottleneck(num_in: int, planes: int) -> nn.Module:
    """torchvision's block, with two groups, at half the size of its input."""
    num_out = planes * Bottleneck.expansion
    conv = nn.Conv2d(num_in, num_out, 1, stride=2, bias=False)
    shortcut = nn.Sequential(conv, nn.BatchNorm2d(num_out))
    return Bottleneck(num_in, planes, 2, shortcut, groups=2, base_width=32)


def mobilenet() -> nn.Module:
    """torchvision's MobileNetV3: depthwise convolutions, squeeze and excitation."""
    block = partial(InvertedResidualConfig, width_mult=0.5)
    blocks = [
        block(16, 3, 16, 16, True, "RE", 2, 1),
        block(16, 3, 32, 24, False, "RE", 2, 1),
        block(24, 3, 32, 24, True, "HS", 1, 1),
        block(24, 5, 48, 24, True, "HS", 1, 1),
    ]
    return MobileNetV3(blocks, last_channel=32, num_classes=3, dropout=0.0)


def retinanet(
    widths: tuple[int, int, int] = (6, 8, 8), out_channels: int = 8, side: int = 32
) -> nn.Module:
    """torchvision's, on a backbone of three layers."""
    backbone = BackboneWithFPN(
        SmallBackbone(widths),
        return_layers={"layer1": "0", "layer2": "1", "layer3": "2"},
        in_channels_list=list(widths),
        out_channels=out_channels,
    )
    sizes = tuple((size, int(size * 1.4)) for size in (8, 12, 16, 20))
    model = RetinaNet(
        backbone,
        num_classes=3,
        anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        min_size=side,
        max_size=side,
        fixed_size=(side, side),
    )
    return Detector(model)


def parts(losses: dict[str, Tensor], targets: Any) -> dict[str, Tensor]:
    """The model's own losses, whose sum is trained."""
    return losses


def _images(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 3, 32, 32, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=rng)


def scenes(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    """Images of different sizes, each with one to three boxes."""
    images, targets = PerSample(), PerSample()
    for _ in range(count):
        height, width = torch.randint(24, 40, (2,), generator=rng).tolist()
        x = torch.rand(3, height, width, generator=rng, dtype=torch.float64)
        num_boxes = int(torch.randint(1, 4, (), generator=rng))
        corner = 10 * torch.rand(num_boxes, 2, generator=rng, dtype=torch.float64)
        size = 8 + 6 * torch.rand(num_boxes, 2, generator=rng, dtype=torch.float64)
        labels = torch.randint(3, (num_boxes,), generator=rng)
        images.append(x)
        boxes = torch.cat([corner, corner + size], 1)
        targets.append({"boxes": boxes, "labels": labels})
    return {"images": images, "targets": targets}, None


VISION = {
    "densenet": Specimen(densenet, classes, _images),
    "resnext": Specimen(ResNeXt, classes, _images),
    "mobilenetv3": Specimen(mobilenet, classes, _images),
    "retinanet": Specimen(
        retinanet,
        parts,
        scenes,
        cuts={
            2: ("pyramid",),
            3: ("body.layer2", "detect"),
            4: ("body.layer2", "body.layer3", "detect"),
        },
    ),
}
