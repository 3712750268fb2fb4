"""A small vision transformer: patches, positions, blocks, head.

Shapes: B images, C channels, S side in pixels, T tokens, W width, K classes.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
from torch import Tensor, nn

from hocket.recipes.models.transformer import Blocks

# Patch embeddings of normalised pixels have a norm near one at first. Positions much
# smaller than that (0.02 is usual for large models) have no effect for ten epochs.
POSITION_STD: Final = 0.5


class Pooling(Enum):
    """The input of the head."""

    TOKEN = "token"  # one learned token beside the patches
    MEAN = "mean"  # the mean over all patches


class VisionTransformer(nn.Module):
    """Images (B, C, S, S) to class scores (B, K). Pre-norm, learned positions.

    Args:
        image_side: S.
        num_channels: C.
        num_classes: K.
        patch_size: pixels per side of a patch; divides `image_side`.
        blocks: the sizes of the blocks; W is their width.
        pooling: the input of the head.

    Source: Dosovitskiy et al., arXiv:2010.11929, section 3.1.
    """

    def __init__(
        self,
        *,
        image_side: int,
        num_channels: int,
        num_classes: int,
        patch_size: int,
        blocks: Blocks,
        pooling: Pooling = Pooling.TOKEN,
    ) -> None:
        super().__init__()
        num_tokens = (image_side // patch_size) ** 2
        self.patches = nn.Conv2d(
            num_channels, blocks.width, patch_size, stride=patch_size
        )
        self.token: nn.Parameter | None = None
        if pooling is Pooling.TOKEN:
            self.token = nn.Parameter(torch.zeros(1, 1, blocks.width))
            num_tokens += 1
        self.positions = nn.Parameter(
            POSITION_STD * torch.randn(num_tokens, blocks.width)
        )
        self.blocks = blocks.make(causal=False)
        self.norm = nn.LayerNorm(blocks.width)
        self.head = nn.Linear(blocks.width, num_classes)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Score the classes."""
        x_BTW = self.patches(image_BCSS).flatten(2).transpose(1, 2)
        if self.token is not None:
            token_B1W = self.token.expand(x_BTW.shape[0], -1, -1)
            x_BTW = torch.cat([token_B1W, x_BTW], dim=1)
        x_BTW = self.norm(self.blocks(x_BTW + self.positions))
        pooled_BW = x_BTW.mean(1) if self.token is None else x_BTW[:, 0]
        score_BK: Tensor = self.head(pooled_BW)
        return score_BK
