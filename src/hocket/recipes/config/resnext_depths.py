"""The depths that a ResNeXt may have."""

from __future__ import annotations

from typing import Final

from hocket.errors import ShapeError

Blocks = tuple[int, int, int, int]  # in each of the four parts

_BY_DEPTH: Final[dict[int, Blocks]] = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_LEAST_MULTIPLE: Final = 194  # four times the blocks of ResNeXt-50


def resnext_blocks(depth: int) -> Blocks:
    """Return how many blocks each of the four parts has.

    Up to 152 as published; beyond that a multiple of ResNeXt-50's 3, 4, 6 and 3, the
    largest that has no more than `depth` layers, as WPipe's ResNeXt-200, 302, 500 and
    800 were made.

    Args:
        depth: layers with weights; three in each block, and two more.

    Raises:
        ShapeError: none has so many; names those that there are.
    """
    if depth in _BY_DEPTH:
        return _BY_DEPTH[depth]
    if depth < _LEAST_MULTIPLE:
        known = ", ".join(map(str, _BY_DEPTH))
        raise ShapeError(
            f"no ResNeXt has depth {depth}: there are {known}, and all from "
            f"{_LEAST_MULTIPLE} on"
        )
    first, second, third, fourth = _BY_DEPTH[50]
    times = (depth - 2) // 3 // (first + second + third + fourth)
    return first * times, second * times, third * times, fourth * times
