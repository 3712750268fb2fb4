"""ResNets and GPT layer by layer: each weight is a layer, as buckets see them.

Source: He et al., arXiv:1512.03385, table 1; Brown et al., arXiv:2005.14165, table 2.1
(GPT-3 Medium's size).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.planner.published.catalogue import CountedLayer, Product

_BLOCKS: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_WIDTHS: Final = (64, 128, 256, 512)
_EXPANSION: Final = 4
_STATES: Final = 1  # of SGD with momentum, per weight


def resnet_convolutions(depth: int) -> tuple[CountedLayer, ...]:
    """All convolutions in order, and the classifier: 54 of ResNet-50, 105 of -101.

    Args:
        depth: 50 or 101.
    """
    return (*_convolutions(depth), _layer("head", 1, 2048, 1000, 2048))


def gpt_products(
    num_blocks: int = 24, width: int = 1024, num_tokens: int = 1024
) -> tuple[CountedLayer, ...]:
    """The embedding, four products of each block, and scores by the embedding."""
    num_words = 50257
    embedding = CountedLayer(
        "embedding", (), 0, num_tokens * width, num_tokens, num_words * width
    )
    blocks = [
        _layer(f"block{i}.{name}", num_tokens, inner, columns, num_tokens * inner)
        for i in range(num_blocks)
        for name, inner, columns in (
            ("qkv", width, 3 * width),
            ("out", width, width),
            ("up", width, 4 * width),
            ("down", 4 * width, width),
        )
    ]
    scores = Product(num_tokens, width, num_words, has_weights=False)
    size = num_tokens * width
    return (embedding, *blocks, CountedLayer("scores", (scores,), 0, size, size))


def _convolutions(depth: int) -> Iterator[CountedLayer]:
    yield _layer("stem", 112**2, 7**2 * 3, 64, 3 * 224**2)
    before, side = 64, 56
    for part, (count, width) in enumerate(zip(_BLOCKS[depth], _WIDTHS, strict=True)):
        wide = _EXPANSION * width
        for number in range(count):
            end = side // 2 if part and not number else side
            name = f"layer{part + 1}.{number}"
            received = before * side**2
            yield _layer(f"{name}.first", side**2, before, width, received)
            yield _layer(f"{name}.middle", end**2, 9 * width, width, width * side**2)
            yield _layer(f"{name}.last", end**2, width, wide, width * end**2)
            if not number:
                yield _layer(f"{name}.shortcut", end**2, before, wide, received)
            before, side = wide, end


def _layer(
    name: str, rows: int, inner: int, columns: int, received_floats: int
) -> CountedLayer:
    product = Product(rows, inner, columns)
    made = rows * columns
    return CountedLayer(
        name, (product,), 4 * made, received_floats, received_floats, 0, _STATES
    )
