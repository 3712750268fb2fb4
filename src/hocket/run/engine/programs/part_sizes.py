"""How the nets of a program cut a batch that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from hocket.core.program import Program
from hocket.run.data.nested_parts import Sizes, nested_sizes
from hocket.run.engine.programs.net_setup import connected_nets

SizesOf: TypeAlias = Callable[[int], Sizes]


def part_sizes(program: Program) -> dict[str, SizesOf]:
    """Return what cuts the batch of each net, so that microbatches nest along flows.

    Of nets that flows connect, the first trained one cuts it evenly.

    Args:
        program: the whole, without copies.
    """
    found: dict[str, SizesOf] = {}
    counts = {net.name: net.num_microbatches for net in program.nets}
    trained = {stage.net for stage in program.stages if stage.trainable}
    for group in connected_nets(program, program.flows):
        first = next((name for name in group if name in trained), group[0])
        each = (counts[first], *(counts[name] for name in group))
        for name in group:
            found[name] = partial(_sizes, each, counts[name], program.num_replicas)
    return found


def _sizes(
    counts: Sequence[int], count: int, num_replicas: int, num_samples: int
) -> Sizes:
    return nested_sizes(num_samples, counts, num_replicas)[count]
