"""The rows of each batch that one worker reads, and batches of such rows.

    batch       rows 0 ─────────────────────────────────── 7
    replica 0   rows 0 ─────── 3    stage 0: inputs    stage 2: targets
    replica 1                       rows 4 ─────── 7   the same

Stages between read neither, unless the model gives them some of its arguments (such as
an attention mask). All workers still know the whole batch's rows, so that they detect
batches that are not the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hocket.run.data.sampler import BatchRows


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """The part of each batch that one worker needs.

    Args:
        inputs: whether it needs inputs: a stage of its takes an argument of the model.
        targets: whether it needs targets: it has the last stage.
        num_microbatches: microbatches of each replica.
        num_replicas: replicas that share the batch.
        replica: this worker's replica.
        device: the device that tensors are moved to.
        draws_once: whether all epochs draw the random numbers of the first one.
    """

    inputs: bool
    targets: bool
    num_microbatches: int
    num_replicas: int
    replica: int
    device: torch.device
    draws_once: bool = False

    def rows(self, num_samples: int) -> slice:
        """Return the rows of a batch that this worker's replica takes."""
        num_parts, each = parts_of(
            num_samples, self.num_microbatches, self.num_replicas
        )
        first = min(self.replica * each, num_parts)
        last = min(first + each, num_parts)
        return slice(
            begin_of(first, num_samples, num_parts),
            begin_of(last, num_samples, num_parts),
        )


@dataclass(frozen=True, slots=True)
class PartBatch:
    """The part of a batch that one worker needs.

    Args:
        num_samples: samples of the whole batch.
        digest: a digest of the whole batch: equal for equal rows, random numbers and
            data sets.
        rows: the rows of the batch that are here.
        inputs: the inputs of these rows; None if they are not needed.
        targets: the targets of these rows; None if they are not needed.
        samples: the samples of the whole batch, where the loader names them.
    """

    num_samples: int
    digest: int
    rows: slice
    inputs: Any
    targets: Any
    samples: BatchRows | None = None


def parts_of(
    num_samples: int, num_microbatches: int, num_replicas: int
) -> tuple[int, int]:
    """Return how many parts a batch is cut into, and how many each replica takes.

    As many microbatches as asked for; fewer of a batch that has fewer samples, and none
    for the last replicas of one that has fewer samples than there are replicas.
    """
    most = min(num_microbatches * num_replicas, num_samples)
    each = -(-most // num_replicas)
    return min(each * num_replicas, num_samples), each


def even_sizes(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Return sizes that differ by at most one sample, larger ones first."""
    size, rest = divmod(num_samples, num_parts)
    return (size + 1,) * rest + (size,) * (num_parts - rest)


def begin_of(part: int, num_samples: int, num_parts: int) -> int:
    """Return the first row of a part; the first parts have one sample more.

    The parts are those of `torch.Tensor.tensor_split`.
    """
    if not num_parts:
        return 0
    size, rest = divmod(num_samples, num_parts)
    return part * size + min(part, rest)
