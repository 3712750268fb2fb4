"""Detects workers that are at different steps, or have different batches.

Each worker reads the whole batch and takes its part. So all must read the same data in
the same order, which they check by comparing headers:

    replica 0   device 0 ──header──▶ device 1 ──header──▶ device 2     each step, ahead
                   ▲                    ▲                    ▲         of the first
                   └── all headers ──┐  └── the same         └── ...   output
    replica 1   device 0 ──header──▶ device 1 ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from hocket.errors import SchemaError
from hocket.model.trace.example import NO_FORM, Form, Lengths
from hocket.run.cluster.group import GroupWork, WorkerGroup
from hocket.run.comm.schema import Schema, TensorSpec

# What a message's shapes follow from: numbers of samples, and other lengths.
Signature: TypeAlias = int | tuple[int, ...] | tuple[int | tuple[int, ...], Lengths]

_LENGTH: Final = 4
HEADER: Final = Schema((TensorSpec((_LENGTH,), "int64"),))
_WHAT: Final = "headers of the replicas"


@dataclass(frozen=True, slots=True)
class StepHeader:
    """The step and batch that all workers must agree on.

    Args:
        number: the step's number, counted over the whole run.
        salt: a digest of the whole batch.
        num_samples: samples of the whole step, over all its batches and replicas.
        sizes: samples of each of the batch's microbatches in this replica.
        first: the batch's first microbatch, counted over the whole step.
        changes: a digest of what the loop has changed in the models so far.
        form: the batch's, as far as it is another than the example's. Values do not
            change the shapes of messages.

    Attributes:
        key: the step's number, and the batch's first microbatch.
    """

    number: int
    salt: int
    num_samples: int
    sizes: tuple[int, ...]
    first: int = 0
    changes: int = 0
    form: Form = NO_FORM
    key: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.number, self.first))

    def place_of(self, microbatch: int) -> tuple[int, int]:
        """Return the step's number, and a microbatch's among all of the step."""
        return self.number, self.first + microbatch

    def shapes(self, sizes: int | tuple[int, ...]) -> Signature:
        """Return what the shapes of a message follow from that has so many samples."""
        return (sizes, self.form.lengths) if self.form.lengths else sizes

    def header(self) -> Tensor:
        """Return the four numbers that are sent."""
        return torch.tensor([self.number, self.salt, self.num_samples, self.changes])


def check_same_header(
    own: Tensor, own_rank: int, other: Tensor, other_rank: int
) -> None:
    """Raise SchemaError if another rank's header differs from this rank's.

    Raises:
        SchemaError: names both sides, and what differs first.
    """
    (step, salt, num_samples, changes), there = own.tolist(), other.tolist()
    if [step, salt, num_samples, changes] == there:
        return
    if changes != there[3]:
        raise SchemaError(
            f"at step {step}, what the loop has changed in the model differs between "
            f"ranks {own_rank} and {other_rank}: an attribute, a mode or a hook was "
            "set on some ranks only, or to other values. Every rank must make the same "
            "changes before the same step"
        )
    if step != there[0]:
        what = (
            f"rank {own_rank} is at step {step}, rank {other_rank} at step "
            f"{there[0]}: do their loaders yield equally many batches?"
        )
    elif num_samples != there[2]:
        what = (
            f"at step {step}, rank {own_rank} has a batch of {num_samples} samples, "
            f"rank {other_rank} one of {there[2]}"
        )
    else:
        what = (
            f"at step {step}, ranks {own_rank} and {other_rank} have different batches "
            f"of {num_samples} samples (digests {salt:08x} and {there[1]:08x})"
        )
    raise SchemaError(
        f"{what}. Every worker must iterate over the same batches in the same order: "
        "seed whatever shuffles them with the same number, and let no sampler share "
        "them out"
    )


class ReplicaRates(Protocol):
    """Learning rates that replicas compare together with their headers."""

    def numbers(self) -> list[float]:
        """Return what is compared; equally many numbers on all replicas."""

    def refuse_replicas(
        self, step: int, by_rank: Mapping[int, Sequence[float]]
    ) -> None:
        """Raise SchemaError if the numbers of two ranks differ."""


class ReplicaCheck:
    """Compares headers and learning rates over the replicas of one device.

    They travel in the background.

    Args:
        group: the replicas.
        rates: this device's learning rates.
    """

    def __init__(self, group: WorkerGroup, rates: ReplicaRates) -> None:
        self._group = group
        self._rates = rates
        self._pending: list[tuple[int, list[Tensor], GroupWork]] = []  # of each batch

    def begin(self, step: StepHeader) -> None:
        """Send a batch's header to the other replicas; every one must call this."""
        rates = torch.tensor(self._rates.numbers(), dtype=torch.float64)
        own = torch.cat([step.header(), rates.view(torch.int64)])
        headers = [torch.empty_like(own) for _ in self._group.ranks]
        work = self._group.all_gather(headers, own, _WHAT)
        self._pending.append((step.number, headers, work))

    def finish(self, number: int) -> None:
        """Compare with all replicas, before anything is updated.

        Args:
            number: the step's number; headers of later steps are kept for later.

        Raises:
            SchemaError: a replica is at another step or batch, or has other rates.
            WaitError: a replica did not send its header.
        """
        ranks, rank = self._group.ranks, self._group.rank
        while self._pending and self._pending[0][0] <= number:
            _, headers, work = self._pending.pop(0)
            self._group.wait(work, _WHAT)
            own = headers[ranks.index(rank)]
            for other, header in zip(ranks, headers, strict=True):
                check_same_header(own[:_LENGTH], rank, header[:_LENGTH], other)
            rates = {
                other: header[_LENGTH:].view(torch.float64).tolist()
                for other, header in zip(ranks, headers, strict=True)
            }
            self._rates.refuse_replicas(number, rates)
