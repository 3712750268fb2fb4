"""One step's data as one worker sees it: one batch, or several to accumulate.

    step          │ batch 0                 │ batch 1                 │ U
    microbatches  │ 0    1   │   2    3     │ 4    5   │   6    7     │
                  │ replica 0 │ replica 1   │ replica 0 │ replica 1   │

Each batch runs in the schedule's order; the gradients add up over all of them, each
microbatch weighted by its share of the step's samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from hocket.model.trace.example import Example
from hocket.run.cluster.layout import Layout
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import Microbatch, digest, split_batch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One batch of a step, cut for this worker's replica.

    Args:
        step: the step's header, for tags and random numbers.
        microbatches: this replica's microbatches.
        closes: whether the step ends with it: gradients are reduced, weights updated.
        loss_scale: what the loss is multiplied by before the backward.
    """

    step: StepHeader
    microbatches: tuple[Microbatch, ...]
    closes: bool = True
    loss_scale: float = 1.0

    def number(self, index: int) -> int:
        """Return a microbatch's number in the step; `index` is the schedule's.

        All replicas count from 0: `StageRunner` adds an offset for each.
        """
        return self.step.first + index

    def share(self, index: int) -> float:
        """Return a microbatch's share of the whole step, by samples."""
        return self.step.sizes[index] / self.step.num_samples

    def shares(self) -> dict[int, float]:
        """Return the shares of all microbatches, by their numbers in the step."""
        step = self.step
        return {step.first + i: n / step.num_samples for i, n in enumerate(step.sizes)}


# The batches under way, by step and net.
Batches: TypeAlias = Mapping[int, Mapping[str, StepBatch]]


def make_step_batches(
    batches: Sequence[Any],
    number: int,
    layout: Layout,
    num_parts: int,
    example: Example,
) -> list[StepBatch]:
    """Cut the batches of one step into microbatches, and take this replica's.

    Args:
        batches: one or more.
        number: the step's number.
        layout: the ranks by device and replica.
        num_parts: microbatches of each batch, over all replicas.
        example: the example that the model was captured with.

    Raises:
        DataError: a batch has fewer samples than microbatches.
        ModelError: a batch differs from the example in more than the samples.
    """
    parts = [split_batch(batch, num_parts, example) for batch in batches]
    num_samples = sum(part.num_samples for batch in parts for part in batch)
    each = num_parts // layout.num_replicas
    begin = layout.replica * each
    step_batches = []
    for i, batch in enumerate(batches):
        mine = parts[i][begin : begin + each]
        sizes = tuple(part.num_samples for part in mine)
        step = StepHeader(
            number, digest(batch), num_samples, sizes, first=i * num_parts
        )
        step_batches.append(StepBatch(step, mine, i == len(batches) - 1))
    return step_batches


def grouped(batches: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield lists of `size` batches; the last one may be shorter."""
    left = iter(batches)
    while group := tuple(islice(left, size)):
        yield group
