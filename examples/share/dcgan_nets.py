"""DCGAN's two nets. Source: Radford et al., arXiv:1511.06434."""

from __future__ import annotations

from torch import nn

NOISE, SIDE = 100, 64


def generator(width: int) -> nn.Sequential:
    """Noise (B, 100, 1, 1) to images (B, 3, 64, 64) between -1 and 1."""
    parts: list[nn.Module] = [nn.ConvTranspose2d(NOISE, 8 * width, 4, bias=False)]
    for many in (8, 4, 2, 1):
        few = many * width // 2 if many > 1 else 3
        parts += [nn.BatchNorm2d(many * width), nn.ReLU()]
        parts += [nn.ConvTranspose2d(many * width, few, 4, 2, 1, bias=False)]
    return nn.Sequential(*parts, nn.Tanh())


def critic(width: int) -> nn.Sequential:
    """Images to scores (B, 1, 1, 1): above 0 for real ones."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False)]
    for few in (1, 2, 4):
        more = nn.Conv2d(few * width, 2 * few * width, 4, 2, 1, bias=False)
        parts += [nn.LeakyReLU(0.2), more, nn.BatchNorm2d(2 * few * width)]
    last = nn.Conv2d(8 * width, 1, 4, bias=False)
    return nn.Sequential(*parts, nn.LeakyReLU(0.2), last)
