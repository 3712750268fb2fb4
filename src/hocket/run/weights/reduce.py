"""Reduces a stage's gradients over its replicas: op R starts it, U waits for it.

All gradients of a stage travel in one flat tensor per type, with one number more for
each parameter: how many replicas have a gradient for it. A parameter that got none
anywhere keeps none, as in the plain loop, where the optimizer then leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.trace.local import as_part, local
from hocket.run.cluster.group import GroupWork, WorkerGroup


class GradientSum(Protocol):
    """Sums the gradients of a stage over workers."""

    def start(self) -> None:
        """Start to sum the gradients, which must be complete, and take them."""

    def is_done(self) -> bool:
        """Return whether `finish` would return at once, as far as is known here."""

    def finish(self) -> None:
        """Wait for the sums, and put them in place of the gradients."""


@dataclass(slots=True)
class _Bucket:
    """Gradients of one type on their way.

    Args:
        parameters: their parameters.
        present: which of them have a gradient here.
        flat: the gradients, and `present` as numbers.
        work: the running all-reduce of `flat`.
    """

    parameters: list[nn.Parameter]
    present: tuple[bool, ...]
    flat: Tensor
    work: GroupWork


class Reducer:
    """Sums the gradients of one stage over a process group.

    Args:
        parameters: the stage's parameters, in the same order on every member of the
            group.
        group: the stage's replicas.
        what: describes the gradients, for errors and reports.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: WorkerGroup, what: str
    ) -> None:
        self._group = group
        self._what = what
        self._by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                self._by_type.setdefault(parameter.dtype, []).append(parameter)
        self._buckets: list[_Bucket] = []
        # Cached: making one copies to a GPU, and the host would wait in every step.
        self._present_flags: dict[tuple[torch.dtype, tuple[bool, ...]], Tensor] = {}

    def start(self) -> None:
        """Start to reduce the gradients, which must be complete, and take them.

        Until `finish` the parameters have no gradients: they would be in memory twice.

        Raises:
            ModelError: a gradient is sparse.
        """
        every = (p for parameters in self._by_type.values() for p in parameters)
        refuse_sparse(every, self._what, "take one replica")
        for dtype, parameters in self._by_type.items():
            present = tuple(parameter.grad is not None for parameter in parameters)
            if (dtype, present) not in self._present_flags:
                self._present_flags[dtype, present] = torch.tensor(
                    present, dtype=dtype, device=parameters[0].device
                )
            flat = _flattened(parameters, self._present_flags[dtype, present])
            for parameter in parameters:
                parameter.grad = None
            work = self._group.all_reduce(flat, self._what)
            self._buckets.append(_Bucket(parameters, present, flat, work))

    def is_done(self) -> bool:
        """Return whether `finish` would return at once, as far as is known here."""
        return all(bucket.work.is_completed() for bucket in self._buckets)

    def finish(self) -> None:
        """Wait for the sums, and put them in place of the gradients.

        Raises:
            WaitError: they did not come within the timeout.
        """
        for bucket in self._buckets:
            self._group.wait(bucket.work, self._what)
            _put_back(bucket)
        self._buckets.clear()


def refuse_sparse(parameters: Iterable[nn.Parameter], what: str, way_out: str) -> None:
    """Refuse sparse gradients, where workers add up.

    Args:
        parameters: those whose gradients are added up.
        what: describes the gradients.
        way_out: another one than a dense embedding; ends the error.

    Raises:
        ModelError: a gradient is sparse.
    """
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise ModelError(
            f"the {what} are sparse, and workers add up dense ones alone: make the "
            f"embedding with sparse=False, or {way_out}"
        )


def _flattened(parameters: Sequence[nn.Parameter], present: Tensor) -> Tensor:
    grads = [
        torch.zeros_like(local(p.detach())) if p.grad is None else local(p.grad)
        for p in parameters
    ]
    return torch.cat([*(grad.reshape(-1) for grad in grads), present])


def _put_back(bucket: _Bucket) -> None:
    """Make gradients views of the flat sum, without copies."""
    parts = [local(parameter.detach()) for parameter in bucket.parameters]
    sizes = [part.numel() for part in parts]
    *sums, present = bucket.flat.split([*sizes, len(sizes)])
    # The host waits for the sums of others only if a gradient is missing here.
    counts = bucket.present if all(bucket.present) else present.tolist()
    for parameter, part, total, count in zip(
        bucket.parameters, parts, sums, counts, strict=True
    ):
        found = as_part(total.view_as(part), parameter)
        parameter.grad = found if count else None
