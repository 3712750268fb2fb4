"""A U-Net, whose skips reach over most of the network."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.run.support.small_models import Specimen


class DoubleConvolution(nn.Sequential):
    """What a U-Net does at each size."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(
            nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips from each size on the way down to the same size on the way up."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        a, b, c = 2 * width, 3 * width, 4 * width
        self.down1 = DoubleConvolution(1, a)
        self.down2 = DoubleConvolution(a, b)
        self.middle = DoubleConvolution(b, c)
        self.up2 = nn.ConvTranspose2d(c, b, 2, stride=2)
        self.join2 = DoubleConvolution(2 * b, b)
        self.up1 = nn.ConvTranspose2d(b, a, 2, stride=2)
        self.join1 = DoubleConvolution(2 * a, a)
        self.out = nn.Conv2d(a, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        d = self.join2(torch.cat([b, self.up2(c)], 1))
        e = self.join1(torch.cat([a, self.up1(d)], 1))
        return cast(Tensor, self.out(e))


def pixels(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over pixels."""
    return F.cross_entropy(logits, targets)


def _masks(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 1, 8, 8, generator=rng, dtype=torch.float64)
    return x, torch.randint(2, (count, 8, 8), generator=rng)


UNET = {"unet": Specimen(UNet, pixels, _masks)}
