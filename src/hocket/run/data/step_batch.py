"""One step's data as one worker sees it: one batch, or several to accumulate.

    step          │ batch 0                 │ batch 1                 │ U
    microbatches  │ 0    1   │   2    3     │ 4    5   │   6    7     │
                  │ replica 0 │ replica 1   │ replica 0 │ replica 1   │

Each batch runs in the schedule's order; the gradients add up over all of them, each
microbatch weighted by its share of the step's samples, or of the targets that count
(`TokenMean`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from hocket.core.program import Net
from hocket.model.trace.example import NO_FORM, Example
from hocket.run.cluster.layout import Layout
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import Microbatch, digest, on_device, split_batch
from hocket.run.data.loss import TokenMean

_samples_of = attrgetter("num_samples")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One batch of a step, cut for this worker's replica.

    Args:
        step: the step's header, for tags and random numbers. Its microbatches are
            numbered from `step.first` on, in each replica.
        microbatches: this replica's microbatches.
        ends_step: whether gradients are reduced and weights updated after it.
        read_scale: returns the factor of the loss before the backward, which is known
            when all earlier steps are over; 1 when not given.
        everywhere: the net's microbatches in all replicas, one replica after the other.
        counts: each microbatch's weight and the whole step's, before the division; by
            samples when not given.
    """

    step: StepHeader
    microbatches: tuple[Microbatch, ...]
    ends_step: bool = True
    read_scale: Callable[[], float] | None = None
    everywhere: tuple[Microbatch, ...] = ()
    counts: tuple[tuple[float, ...], float] | None = None

    def share(self, index: int) -> float:
        """Return a microbatch's share of the whole step; 0 if nothing in it counts."""
        sizes, total = self.counts or (self.step.sizes, self.step.num_samples)
        return sizes[index] / total if total else 0.0

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; to be read once all earlier steps are over."""
        return 1.0 if self.read_scale is None else self.read_scale()

    def weight(self, index: int) -> float:
        """Return the factor of a microbatch's loss; see `loss_scale`."""
        return self.share(index) * self.loss_scale

    def shares(self) -> dict[int, float]:
        """Return the shares of all microbatches, by their numbers in the step."""
        return {self.step.first + i: self.share(i) for i in range(len(self.step.sizes))}


# One batch of each net.
NetBatches: TypeAlias = Mapping[str, StepBatch]
# The batches under way, by step and net.
Batches: TypeAlias = Mapping[int, NetBatches]


def first_of(batches: NetBatches) -> StepBatch:
    """Return the batch of the first net; those of all nets are of one step."""
    return next(iter(batches.values()))


def make_step_batches(
    batches: Sequence[Any],
    number: int,
    layout: Layout,
    num_microbatches: Mapping[str, int],
    example: Example | None,
    device: torch.device | None,
    sizes_of: Callable[[int], Sequence[int]] | None = None,
    salts: Sequence[int] | None = None,
) -> list[NetBatches]:
    """Cut the batches of one step into microbatches, and take this replica's.

    Args:
        batches: one or more.
        number: the step's number.
        layout: the ranks by device and replica.
        num_microbatches: each net's microbatches in each replica. Where several nets
            share the batch, the first net gets the first of them.
        example: the example that the model was captured with; None if any form will
            do.
        device: where the stages are; None if the batches are there.
        sizes_of: as for `split_batch`.
        salts: the batches' digests, if they are known.

    Raises:
        DataError: a batch has fewer samples than microbatches.
        ModelError: a batch differs from the example in more than the samples.
    """
    each = sum(num_microbatches.values())
    num_parts = each * layout.num_pipelines
    if salts is None:  # before copies: of tensors on a GPU, only shapes are looked at
        salts = [digest(batch) for batch in batches]
    if device is not None:
        batches = [on_device(batch, device) for batch in batches]
    parts = [split_batch(batch, num_parts, example, sizes_of) for batch in batches]
    num_samples = sum(map(_samples_of, chain(*parts)))
    step_batches: list[NetBatches] = []
    for i, salt in enumerate(salts):
        by_net: dict[str, StepBatch] = {}
        first, leaves = 0, parts[i][0].leaves
        form = example.form_of(leaves) if example is not None and leaves else NO_FORM
        for net, count in num_microbatches.items():
            begins = range(first, num_parts, each)
            everywhere = _numbered(
                [x for at in begins for x in parts[i][at : at + count]]
            )
            mine = everywhere[layout.pipeline * count :][:count]
            sizes = tuple(map(_samples_of, mine))
            step = StepHeader(
                number, salt, num_samples, sizes, first=i * num_parts, form=form
            )
            ends_step = i == len(batches) - 1
            by_net[net] = StepBatch(step, mine, ends_step, everywhere=everywhere)
            first += count
        step_batches.append(by_net)
    return step_batches


def make_net_batches(
    batches: Sequence[Any],
    number: int,
    layout: Layout,
    nets: Sequence[Net],
    example: Example | None,
    device: torch.device,
    sizes_of: Mapping[str, Callable[[int], Sequence[int]]],
) -> list[NetBatches]:
    """Cut the batches of one step for several nets, of which each gets all samples.

    Args:
        batches: one or more.
        number: the step's number.
        layout: the ranks by device and replica.
        nets: the program's.
        example: as for `make_step_batches`.
        device: where the stages are.
        sizes_of: as for `make_step_batches`, by net.

    Raises:
        DataError: a batch has fewer samples than microbatches.
        ModelError: a batch differs from the example in more than the samples.
    """
    salts = [digest(batch) for batch in batches]
    here = [on_device(batch, device) for batch in batches]
    by_net = [
        make_step_batches(
            here,
            number,
            layout,
            {net.name: net.num_microbatches},
            example,
            None,
            sizes_of[net.name],
            salts,
        )
        for net in nets
    ]
    return [
        {net: x for made in parts for net, x in made.items()}
        for parts in zip(*by_net, strict=True)
    ]


def with_changes(batches: list[NetBatches], changes: int) -> list[NetBatches]:
    """Put a digest of what the loop has changed in the models into all headers."""
    if not changes:
        return batches
    return [
        {
            net: replace(work, step=replace(work.step, changes=changes))
            for net, work in one.items()
        }
        for one in batches
    ]


def _numbered(parts: Sequence[Microbatch]) -> tuple[Microbatch, ...]:
    """Give each microbatch its first row."""
    begins = accumulate(map(_samples_of, parts), initial=0)
    return tuple(
        [
            Microbatch(x.leaves, x.targets, x.num_samples, begin, x.samples, x.shared)
            for x, begin in zip(parts, begins, strict=False)
        ]
    )


def with_counts(
    batches: Sequence[NetBatches],
    net: str,
    loss: TokenMean,
    add_up: Callable[[float], float],
) -> list[NetBatches]:
    """Weight the microbatches of one step by the targets that count.

    Args:
        batches: all batches of the step.
        net: the net that the loss trains.
        loss: counts the targets.
        add_up: adds a number up over the replicas.
    """
    works = [batch[net] for batch in batches]
    counts = [
        tuple(loss.count_of(x.targets) for x in work.microbatches) for work in works
    ]
    total = add_up(sum(map(sum, counts)))
    return [
        {**batch, net: replace(work, counts=(own, total))}
        for batch, work, own in zip(batches, works, counts, strict=True)
    ]


def grouped(batches: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield lists of `size` batches; the last one may be shorter."""
    left = iter(batches)
    while group := tuple(islice(left, size)):
        yield group
