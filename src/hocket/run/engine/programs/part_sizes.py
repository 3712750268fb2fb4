"""How the nets of a program cut a batch that they share: their microbatches nest.

Where a flow leads from a net with finer microbatches to one with coarser ones, each of
the latter must be made of whole parts of the former, whatever the number of samples:

    10 samples, 3 microbatches     4       3       3        those of the first net
    6 microbatches                 2   2   2   1   2   1    each cut in two
    tensor_split in 6              2   2   2   2   1   1    would not nest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import sub
from typing import TypeAlias

from hocket.core.program import Program
from hocket.errors import DataError
from hocket.run.data.reads import even_sizes
from hocket.run.engine.programs.net_setup import connected_nets

Sizes: TypeAlias = tuple[int, ...]
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
            found[name] = partial(_sizes, each, counts[name], program.num_pipelines)
    return found


def _sizes(
    counts: Sequence[int], count: int, num_replicas: int, num_samples: int
) -> Sizes:
    return nested_sizes(num_samples, counts, num_replicas)[count]


def nested_sizes(
    num_samples: int, counts: Sequence[int], num_replicas: int
) -> dict[int, Sizes]:
    """Return the sizes of all microbatches of a batch, for each number of them.

    Args:
        num_samples: samples of the batch, over all replicas.
        counts: the microbatches of each net in one replica. Those of the first are
            equal but for one sample; all others begin where the first's do, or within
            one of them.
        num_replicas: replicas that share the batch; each has as many microbatches.

    Raises:
        DataError: a microbatch would have no sample.
    """
    first = counts[0]
    even = even_sizes(num_samples, first * num_replicas)
    begins = [*accumulate(even, initial=0)]

    def begin(part: int, count: int) -> int:
        """Return where a part begins; equal shares of the batch begin at one row."""
        whole, rest = divmod(part * first, count)
        return begins[whole] + (-(-rest * even[whole] // count) if rest else 0)

    sizes: dict[int, Sizes] = {}
    for count in set(counts):
        edges = begins
        if count != first:
            edges = [begin(part, count) for part in range(count * num_replicas + 1)]
        sizes[count] = tuple(map(sub, edges[1:], edges))
        if min(sizes[count]) < 1:
            raise DataError(
                f"a batch of {num_samples} samples has {first * num_replicas} "
                f"microbatches, of which the smallest has {min(even)}: it cannot be "
                f"cut for a net with {count * num_replicas} microbatches. Use a larger "
                "batch, or drop_last=True in the loader if only the last batch is so "
                "small"
            )
    return sizes
