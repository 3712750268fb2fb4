"""What one worker needs of each batch, and a batch of which it has only that.

    batch       rows 0 ─────────────────────────────────── 7
    replica 0   rows 0 ─────── 3    stage 0: inputs    stage 2: targets
    replica 1                       rows 4 ─────── 7   likewise

Stages between read neither, unless the model gives them some of its arguments (such as
an attention mask). All workers still know the whole batch's rows, so that they notice
when theirs are not the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What one worker needs of each batch.

    Args:
        inputs: whether it needs them; a stage does that takes an argument of the model.
        targets: likewise; the last stage does.
        num_microbatches: of each replica.
        num_replicas: that share the batch.
        replica: this worker's.
        device: where the tensors go.
    """

    inputs: bool
    targets: bool
    num_microbatches: int
    num_replicas: int
    replica: int
    device: torch.device

    def rows(self, num_samples: int) -> slice:
        """The rows of a batch that this worker's replica takes."""
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
    """A batch of which this worker has what it needs.

    Args:
        num_samples: of the whole batch.
        digest: of the whole batch: equal for equal rows, draws and data sets.
        rows: of the batch that are here.
        inputs: of these rows; None where they are not needed.
        targets: likewise.
    """

    num_samples: int
    digest: int
    rows: slice
    inputs: Any
    targets: Any


def parts_of(
    num_samples: int, num_microbatches: int, num_replicas: int
) -> tuple[int, int]:
    """How many parts a batch is cut into, and how many of them each replica takes.

    As many microbatches as asked for; fewer of a batch that has fewer samples, and none
    for the last replicas of one that has fewer samples than there are replicas.
    """
    most = min(num_microbatches * num_replicas, num_samples)
    each = -(-most // num_replicas)
    return min(each * num_replicas, num_samples), each


def begin_of(part: int, num_samples: int, num_parts: int) -> int:
    """The row at which a part begins; the first parts take one sample more.

    The same parts as `torch.Tensor.tensor_split` makes.
    """
    if not num_parts:
        return 0
    size, rest = divmod(num_samples, num_parts)
    return part * size + min(part, rest)
