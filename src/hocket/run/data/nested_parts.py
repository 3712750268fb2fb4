"""Microbatches of several nets that share a batch, cut so that they nest.

Where a flow leads from a net with finer microbatches to one with coarser ones, each of
the latter must be made of whole parts of the former, whatever the number of samples:

    10 samples, 3 microbatches     4       3       3        those of the first net
    6 microbatches                 2   2   2   1   2   1    each cut in two
    tensor_split in 6              2   2   2   2   1   1    would not nest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hocket.errors import DataError
from hocket.run.data.reads import even_sizes

Sizes: TypeAlias = tuple[int, ...]


def nested_sizes(
    num_samples: int, counts: Sequence[int], num_replicas: int
) -> dict[int, Sizes]:
    """Return the sizes of all microbatches of a batch, for each number of them.

    Args:
        num_samples: samples of the batch, over all replicas.
        counts: the microbatches of each net in one replica. Those of the first are
            equal but for one sample; coarser ones are made of them, finer ones cut
            from them.
        num_replicas: replicas that share the batch; each has as many microbatches.

    Raises:
        DataError: a microbatch has fewer samples than it is to be cut into parts.
    """
    first = counts[0]
    sizes = {first: even_sizes(num_samples, first * num_replicas)}
    coarser = [count for count in {1, *counts} if first % count == 0]
    for count in coarser:
        each, known = first // count, sizes[first]
        begins = range(0, len(known), each)
        sizes[count] = tuple(sum(known[at : at + each]) for at in begins)
    for count in sorted(set(counts).difference(coarser)):
        whole = max(known for known in sizes if count % known == 0)
        num_parts = count // whole
        if min(sizes[whole]) < num_parts:
            raise DataError(
                f"a batch of {num_samples} samples has {whole * num_replicas} "
                f"microbatches, of which the smallest has {min(sizes[whole])}: it "
                f"cannot be cut into {num_parts} for a net with "
                f"{count * num_replicas} microbatches. Use a larger batch, or "
                "drop_last=True in the loader if only the last batch is so small"
            )
        sizes[count] = tuple(
            x for size in sizes[whole] for x in even_sizes(size, num_parts)
        )
    return sizes
