"""A small residual network for images: a stem, three groups of blocks, a head.

    image ─ stem ─┬─ conv ─ norm ─ ReLU ─ conv ─ norm ─(+)─ ReLU ─ ... ─ mean ─ head
                  └──────────── shortcut ──────────────┘

From group to group the image's side becomes half as long, and the channels twice as
many. Batch normalization takes its means over a microbatch, not over the whole batch.

Shapes: B images, C channels, S side in pixels, K classes.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn
from torch.nn import functional

NUM_GROUPS: Final = 3


class ResNet(nn.Module):
    """Images (B, C, S, S) to class scores (B, K).

    Args:
        num_channels: C.
        num_classes: K.
        width: channels in the first group.
        num_blocks: blocks in each group; 3 make the paper's ResNet-20, 9 its ResNet-56.

    Source: He et al., arXiv:1512.03385, section 4.2; but where the size changes, the
    shortcuts are projections ("option B"), as in their networks for ImageNet.
    """

    def __init__(
        self,
        *,
        num_channels: int,
        num_classes: int,
        width: int = 16,
        num_blocks: int = 3,
    ) -> None:
        super().__init__()
        widths = [width * 2**group for group in range(NUM_GROUPS)]
        self.stem = nn.Sequential(_convolution(num_channels, width, 1), nn.ReLU())
        blocks: list[nn.Module] = []
        before = width
        for group, channels in enumerate(widths):
            for number in range(num_blocks):
                stride = 2 if group and not number else 1
                blocks.append(ResidualBlock(before, channels, stride))
                before = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Score the classes."""
        x_BCSS = self.blocks(self.stem(image_BCSS))
        score_BK: Tensor = self.head(x_BCSS.mean((-2, -1)))
        return score_BK


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut.

    Args:
        before: the input channels.
        channels: the output channels.
        stride: the first convolution's stride.
    """

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
