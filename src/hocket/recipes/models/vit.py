"""A small vision transformer: patches, positions, blocks, head.

Shapes: B images, C channels, S side in pixels, T tokens, W width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional


# A transformer's block: attention and MLP, pre-norm.
#
#     x ──┬─ norm ─ attention ─ dropout ─(+)──┬─ norm ─ MLP ─ dropout ─(+)─▶
#         └───────────────────────────────┘   └────────────────────────┘
#
# Only one tensor crosses from block to block, so that between any two a cut is cheap.
#
# Shapes: B samples, T tokens, W width, H heads, D = W / H.
@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes of a stack of blocks.

    Args:
        width: W, a multiple of `num_heads`.
        num_blocks: the number of blocks.
        num_heads: H.
        mlp_width: features inside each MLP.
        dropout: the probability, on what attention and MLP add.
    """

    width: int
    num_blocks: int
    num_heads: int
    mlp_width: int
    dropout: float = 0.0

    def make(self, *, causal: bool) -> nn.Sequential:
        """Make a newly initialised stack."""
        return nn.Sequential(
            *(Block(self, causal=causal) for _ in range(self.num_blocks))
        )


class Attention(nn.Module):
    """Multi-head self-attention: (B, T, W) to (B, T, W).

    Args:
        width: W, a multiple of `num_heads`.
        num_heads: H.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Mix the tokens."""
        qkv_BT3HD = self.qkv(x_BTW).unflatten(-1, (3, self.num_heads, -1))
        q_BHTD, k_BHTD, v_BHTD = qkv_BT3HD.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTD = functional.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=self.causal
        )
        out_BTW: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(-2))
        return out_BTW


class Block(nn.Module):
    """Attention, then an MLP, each with a norm before and a residual after.

    Args:
        sizes: the sizes of the stack.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, sizes: Blocks, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.num_heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, sizes.mlp_width),
            nn.GELU(),
            nn.Linear(sizes.mlp_width, sizes.width),
        )
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """One step of the residual stream."""
        x_BTW = x_BTW + self.dropout(self.attention(self.attention_norm(x_BTW)))
        out_BTW: Tensor = x_BTW + self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return out_BTW


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
