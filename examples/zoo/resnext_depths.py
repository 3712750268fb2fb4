"""The depths that a ResNeXt may have: the published ones, and WPipe's multiples."""

from __future__ import annotations

from typing import Final

from hocket.errors import RecipeError

_BY_DEPTH: Final = {
    14: [1, 1, 1, 1],
    26: [2, 2, 2, 2],
    50: [3, 4, 6, 3],
    101: [3, 4, 23, 3],
    152: [3, 8, 36, 3],
}


def resnext_blocks(depth: int) -> list[int]:
    """Return how many blocks each of the four parts has.

    Up to 152 as published; beyond that a multiple of ResNeXt-50's, the largest that has
    no more than `depth` layers, as WPipe's ResNeXt-200, 302, 500 and 800 were made.

    Args:
        depth: layers with weights; three in each block, and two more.

    Raises:
        RecipeError: none has so many; names those that there are.
    """
    times = (depth - 2) // 48
    if depth not in _BY_DEPTH and times < 4:
        raise RecipeError(
            f"model.depth: no ResNeXt has depth {depth}: there are "
            f"{', '.join(map(str, _BY_DEPTH))}, and all from 194 on"
        )
    return _BY_DEPTH.get(depth) or [num * times for num in _BY_DEPTH[50]]
