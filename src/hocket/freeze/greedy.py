"""PipeTransformer's own partition and pipeline lengths, for comparison.

    sizes    0.74 2.36 4.72 2.36 │ 4.72 2.36 │ ...       K devices, from the front
                                 └ the next unit would pass mean + variance

Source: the released code of PipeTransformer (ICML 2021); Algorithm 1 of its paper. It
counts parameters alone; `hocket.planner.balance` cuts by measured seconds, exactly.
With `balance="greedy"`, a run cuts and shortens its pipeline by these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import pvariance
from typing import Final, Literal

from hocket.errors import ShapeError

Balance = Literal["exact", "greedy"]
FROZEN_SHARE: Final = 1 / 6  # the memory of a frozen layer relative to an active one


def greedy(
    sizes: Sequence[float], num_devices: int, frozen_size: float = 0.0
) -> list[int]:
    """Return how many units each device gets.

    Args:
        sizes: the units' sizes; PipeTransformer counts millions of parameters.
        num_devices: devices; the last takes all that is left.
        frozen_size: the size of the frozen part, which the first device runs: it counts
            for a sixth, so that fewer units fit beside it. The released code has the
            rule, and calls it with no frozen part at all.

    >>> greedy([1.0, 2.0, 1.0, 2.0, 1.0], 2)
    [2, 3]
    """
    counts, begin = [], 0
    for device in range(num_devices - 1):
        left = sizes[begin:]
        num_left = num_devices - device
        most = (sum(left) + (pvariance(left) if left else 0.0)) / num_left
        load = frozen_size * FROZEN_SHARE if device == 0 else 0.0
        end = begin
        while end < len(sizes) and load + sizes[end] < most:
            load += sizes[end]
            end += 1
        counts.append(end - begin)
        begin = end
    return [*counts, len(sizes) - begin]


def greedy_boundaries(
    sizes: Sequence[float], num_stages: int, num_frozen: int = 0
) -> tuple[int, ...]:
    """Return the units at which stages 1, 2, ... begin, behind frozen units.

    Each stage gets a unit, also where the rule alone leaves a device without.

    Args:
        sizes: the units' sizes, in millions of parameters.
        num_stages: the stages that train.
        num_frozen: the units at the front that are frozen.

    Raises:
        ShapeError: there are fewer units left than stages.

    >>> greedy_boundaries([1.0, 1.0, 2.0, 1.0, 2.0, 1.0], 2, num_frozen=1)
    (3,)
    >>> greedy_boundaries([9.0, 1.0, 1.0], 2)  # all are below mean + variance
    (2,)
    """
    num_left = len(sizes) - num_frozen
    if num_left < num_stages:
        raise ShapeError(
            f"{num_left} layers of {len(sizes)} are left to train, fewer than "
            f"{num_stages} stages: take fewer stages, or freeze fewer layers"
        )
    counts = greedy(sizes[num_frozen:], num_stages, sum(sizes[:num_frozen]))
    begins: list[int] = []
    for stage, place in enumerate(accumulate(counts[:-1]), start=1):
        least = begins[-1] + 1 if begins else 1
        begins.append(min(max(place, least), num_left - num_stages + stage))
    return tuple(num_frozen + begin for begin in begins)


def largest_part(sizes: Sequence[float], num_devices: int) -> float:
    """Return the size of the largest part that `greedy` makes."""
    largest, begin = 0.0, 0
    for count in greedy(sizes, num_devices):
        largest = max(largest, sum(sizes[begin : begin + count]))
        begin += count
    return largest


def halved(sizes: Sequence[float], num_devices: int, most: float) -> int:
    """Return the shortest pipeline by halving whose parts are no larger than `most`.

    Args:
        sizes: the units that still train.
        num_devices: devices now.
        most: the largest part of the first pipeline, with nothing frozen.
    """
    while num_devices >= 2 and largest_part(sizes, num_devices // 2) <= most:
        num_devices //= 2
    return num_devices
