"""One step's data, as one worker sees it: one batch, or several for one update.

    step          │ batch 0                 │ batch 1                 │ U
    microbatches  │ 0    1   │   2    3     │ 4    5   │   6    7     │
                  │ replica 0 │ replica 1   │ replica 0 │ replica 1   │

Each batch is played as the schedule says; the gradients add up over all of them, each
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
    """One batch of a step, as this worker's replica sees it.

    Args:
        step: for tags and random numbers.
        microbatches: of this replica.
        closes: whether the step ends with it: gradients are reduced, weights updated.
        loss_scale: what the loss is multiplied by before the backward.
    """

    step: StepHeader
    microbatches: tuple[Microbatch, ...]
    closes: bool = True
    loss_scale: float = 1.0

    def number(self, index: int) -> int:
        """A microbatch's number in the step, where `index` is that in the schedule.

        Replicas count alike: `StageRunner` adds what tells them apart.
        """
        return self.step.first + index

    def share(self, index: int) -> float:
        """How much of the whole step a microbatch is, by samples."""
        return self.step.sizes[index] / self.step.num_samples

    def shares(self) -> dict[int, float]:
        """Of all microbatches, by their numbers in the step."""
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
        number: of the step.
        layout: this worker's place.
        num_parts: microbatches of each batch, over all replicas.
        example: what the model was captured with.

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
    """Several batches at a time; the last time maybe fewer."""
    left = iter(batches)
    while group := tuple(islice(left, size)):
        yield group
