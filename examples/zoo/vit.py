"""timm's vision transformer, of any size.

[model]
kind = "function"
function = "examples.zoo.vit:vit"
width = 768
"""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from examples.zoo.pretrained import begin_with
from hocket.errors import RecipeError


def vit(
    data: Any,
    patch_size: int = 16,
    width: int = 768,
    num_blocks: int = 12,
    num_heads: int = 12,
    mlp_width: int = 3072,
    dropout: float = 0.0,
    pretrained: str | None = None,
) -> nn.Module:
    """Images to class scores, by pre-norm blocks and a class token.

    Args:
        data: has `side`, `num_channels` and `num_classes`.
        patch_size: pixels of a patch's side; divides the images'.
        width: features of each token.
        num_blocks: pairs of attention and MLP.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability behind each linear layer that ends in the width.
        pretrained: a folder with timm's weights to begin with, or those of a run.

    Raises:
        DataError: the weights are missing, or another model's.
        RecipeError: the patches do not fill the images.

    Source: Dosovitskiy et al., arXiv:2010.11929.
    """
    if data.side % patch_size:
        raise RecipeError(
            f"model.patch_size {patch_size} does not divide the images' side of "
            f"{data.side} pixels"
        )
    net: nn.Module = VisionTransformer(
        img_size=data.side,
        patch_size=patch_size,
        in_chans=data.num_channels,
        num_classes=data.num_classes,
        embed_dim=width,
        depth=num_blocks,
        num_heads=num_heads,
        mlp_ratio=(mlp_width + 0.5) / width,  # it rounds down
        pos_drop_rate=dropout,
        proj_drop_rate=dropout,
    )
    return net if pretrained is None else begin_with(net, pretrained, "head.")
