"""Cut a row of layers into stages so that the slowest stage is as fast as can be.

    layers   3  1  4 │ 1  5 │ 9        3 stages, the slowest takes 9
    stage       8    │   6  │ 9

Exactly so: by dynamic programming over all cuts, not by a rule of thumb.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from hocket.errors import ShapeError


def balance(
    layer_s: Sequence[float],
    num_stages: int,
    *,
    boundary_s: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The boundaries with the smallest possible slowest stage, exactly.

    Dynamic programming over (stages, layers), in `num_stages * num_layers^2` steps. Of
    the cuts that are equally good, the one whose stages differ least (the smallest sum
    of squares) is taken.

    Args:
        layer_s: seconds of each layer.
        num_stages: how many stages, each of at least one layer.
        boundary_s: seconds that a cut before each layer adds to the stage before and to
            the stage behind it (messages); entry 0 is not used.

    Returns:
        The layers at which stages 1, 2, ... begin.

    Raises:
        ShapeError: there are fewer layers than stages.
    """
    num_layers = len(layer_s)
    if not 1 <= num_stages <= num_layers:
        raise ShapeError(
            f"{num_layers} layers cannot be cut into {num_stages} stages; 1 to "
            f"{num_layers} are possible"
        )
    until = [0.0, *accumulate(layer_s)]
    edge_s = [0.0] * (num_layers + 1)
    if boundary_s is not None:
        edge_s[1:num_layers] = boundary_s[1:num_layers]

    def stage_s(begin: int, end: int) -> float:
        return until[end] - until[begin] + edge_s[begin] + edge_s[end]

    slowest, _ = _best(num_layers, num_stages, stage_s, max)

    def squared(begin: int, end: int) -> float:
        seconds = stage_s(begin, end)
        return seconds * seconds if seconds <= slowest else inf

    _, boundaries = _best(num_layers, num_stages, squared, operator.add)
    return boundaries


def _best(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest cut, where stages' costs are joined by `max` or by a sum."""
    best = [cost(0, end) if end else inf for end in range(num_layers + 1)]
    came_from: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        row, choice = [inf] * (num_layers + 1), [stages - 1] * (num_layers + 1)
        for end in range(stages, num_layers + 1):
            row[end], choice[end] = min(
                (join(best[i], cost(i, end)), i) for i in range(stages - 1, end)
            )
        best = row
        came_from.append(choice)
    boundaries: list[int] = []
    end = num_layers
    for choice in reversed(came_from):
        end = choice[end]
        boundaries.append(end)
    return best[num_layers], tuple(reversed(boundaries))
