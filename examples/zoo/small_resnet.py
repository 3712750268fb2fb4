"""The small residual networks for CIFAR: a stem, three groups of blocks, a head.

    image ─ stem ─┬─ conv ─ norm ─ ReLU ─ conv ─ norm ─(+)─ ReLU ─ ... ─ mean ─ head
                  └──────────── shortcut ──────────────┘

From group to group the image's side becomes half as long, and the channels twice as
many. Batch normalization takes its means over a microbatch, not over the whole batch.
torchvision's and timm's ResNets have four groups, and begin at a quarter of the side.

Shapes: B images, C channels, S side in pixels, K classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class ResNet(nn.Module):
    """Images (B, C, S, S) to class scores (B, K).

    Args:
        data: has `num_channels` and `num_classes`.
        width: channels of the first of three groups.
        num_blocks: blocks in each group; 3 make ResNet-20, 9 ResNet-56.

    Source: He et al., arXiv:1512.03385, section 4.2; but where the size changes, the
    shortcuts are projections ("option B"), as in their networks for ImageNet.
    """

    def __init__(self, data: Any, width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(data.num_channels, width, 1), nn.ReLU())
        blocks: list[nn.Module] = []
        before = width
        for group in range(3):
            for number in range(num_blocks):
                stride = 2 if group and not number else 1
                blocks.append(_Residual(before, width * 2**group, stride))
                before = width * 2**group
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, data.num_classes)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Score the classes."""
        x_BCSS = self.blocks(self.stem(image_BCSS))
        score_BK: Tensor = self.head(x_BCSS.mean((-2, -1)))
        return score_BK


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(before, channels, stride)
        self.second = _convolution(channels, channels, 1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """One step of the residual stream."""
        inner_BCSS = self.second(functional.relu(self.first(x_BCSS)))
        return functional.relu(inner_BCSS + self.shortcut(x_BCSS))


def _convolution(before: int, channels: int, stride: int) -> nn.Sequential:
    """3 x 3, normalised; the norm has the bias."""
    convolution = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(channels))
