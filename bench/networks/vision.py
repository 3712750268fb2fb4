"""Vision transformers and ResNets, counted by hand from the counts of their kin.

Sources: Dosovitskiy et al., arXiv:2010.11929, table 1, and Chen et al.,
arXiv:2104.02057 (ViT-Small); He et al., arXiv:1512.03385, table 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bench.networks.resnext import convolution_layer, resnext
from bench.networks.transformers import transformer
from hocket.planner.published.catalogue import CountedLayer, Product

VITS: Final = {  # blocks, width, heads, pixels of a patch's side
    "ViT-Small": (12, 384, 12, 16),
    "ViT-Base": (12, 768, 12, 16),
    "ViT-Large": (24, 1024, 16, 16),
    "ViT-Huge": (32, 1280, 16, 14),
}
_SIDE: Final = 224  # of an image
_BASIC: Final = (2, 2, 2, 2)  # blocks in each part of ResNet-18
_BASIC_WIDTHS: Final = (64, 128, 256, 512)
_BASIC_DEPTH: Final = 18
_NUM_CLASSES: Final = 100


def vit(name: str) -> tuple[CountedLayer, ...]:
    """Patches, blocks of attention and MLP, and a classifier's two scores."""
    num_blocks, width, num_heads, patch = VITS[name]
    num_patches = (_SIDE // patch) ** 2
    first, *others = transformer(
        num_blocks, width, num_heads, num_patches + 1, num_words=1, num_scored=0
    )
    patches = replace(
        first,
        name="patches",
        products=(Product(num_patches, 3 * patch**2, width),),
        received_floats=3 * _SIDE**2,
        num_weights=(num_patches + 2) * width,
    )
    return (patches, *others)


def resnet(depth: int) -> tuple[CountedLayer, ...]:
    """A stem, blocks and a head: of two convolutions for 18, else of three.

    Args:
        depth: 18, 50, 101 or 152.
    """
    if depth != _BASIC_DEPTH:
        return resnext(depth, num_groups=1, group_width=64)
    stem, *_ = resnext(50)
    blocks: list[CountedLayer] = []
    before, side = 64, _SIDE // 4
    for part, (count, width) in enumerate(zip(_BASIC, _BASIC_WIDTHS, strict=True)):
        for number in range(count):
            end = side // 2 if part and not number else side
            name = f"layer{part + 1}.{number}"
            blocks.append(convolution_layer(name, before, width, side, end))
            before, side = width, end
    head = replace(
        resnext(50)[-1],
        products=(Product(1, before, _NUM_CLASSES),),
        other_floats=before * side**2,
        kept_floats=before,
        received_floats=before * side**2,
        num_weights=_NUM_CLASSES,
    )
    return (stem, *blocks, head)
