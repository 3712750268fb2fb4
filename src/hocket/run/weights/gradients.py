"""All gradients of the model, looked at together.

Each worker tells the norms of the gradients that it holds, and all add them up
(sum_of_all.py). A sum with zeros is exact, so that every worker ends with the same
numbers, of all parameters:

    parameter    a.weight   a.bias │ b.weight   b.bias      in the uncut model's order
    device 0        3.1       0.2  │     0         0
    device 1         0         0   │    nan       0.7
    all             3.1       0.2       nan       0.7       b.weight is at fault

From these follows all else, alike on every worker: whether there may be an update, and
the norm of the whole, which is what `torch.nn.utils.get_total_norm` finds for the uncut
model, to the last bit where the gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from hocket.run.comm.all_sum import AllSum

_NONE: Final = -1.0  # told instead of a norm: the parameter got no gradient


@dataclass(frozen=True, slots=True)
class GradientStatus:
    """What all workers know of a step's gradients.

    Args:
        norm: of all gradients together; no finite number if one of them has none.
        culprit: the first parameter whose gradient is not finite; empty if all are.
    """

    norm: float
    culprit: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether the weights may be updated."""
        return math.isfinite(self.norm)


class Gradients:
    """The gradients that one worker holds, seen as a part of all.

    Args:
        names: of all parameters that are trained, in the uncut model's order.
        held: those on this worker.
        counted: the names whose norm this worker tells, for of a shared weight, and of
            replicas, several workers hold the same gradient.
        all_workers: add up what they tell; None if this is the only one.
        device: where the gradients are.
        dtype: that holds all gradients of the model.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        held: Mapping[str, nn.Parameter],
        counted: frozenset[str],
        all_workers: AllSum | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._names = names
        self._held = tuple(held.values())
        selected = [(i, held[name]) for i, name in enumerate(names) if name in counted]
        self._counted = [parameter for _, parameter in selected]
        self._all_workers = all_workers
        self._device = device
        self._type = dtype
        # Made once: to index with lists makes the host wait for a GPU, each time.
        self._rows = torch.tensor(
            [i for i, _ in selected], dtype=torch.long, device=device
        )
        self._none = torch.tensor(_NONE, dtype=dtype, device=device)
        self._norms = torch.zeros(0)

    @property
    def allows_any_order(self) -> bool:
        """Whether each worker may tell several such groups in an order of its own."""
        return self._all_workers is None or self._all_workers.allows_any_order

    def post(self, step: int, norms: Tensor | None = None) -> None:
        """Tell all others; every worker must call this, with its gradients complete.

        Args:
            step: the same on every worker.
            norms: from `own_norms`, where they were looked at before.
        """
        self._norms = self.own_norms() if norms is None else norms
        if self._all_workers is not None:
            self._all_workers.post(self._norms, step)

    def wait(self) -> GradientStatus:
        """What all have told; once after each `post`.

        Raises:
            WaitError: another worker did not come.
        """
        norms = self._norms
        if self._all_workers is not None:
            self._all_workers.wait()
        return self.status_of(norms)

    def status_of(self, norms: Tensor) -> GradientStatus:
        """What follows from norms that nobody else adds to."""
        values = norms.tolist()
        # To pick some costs several times as much as the rest.
        found = norms[norms != _NONE] if _NONE in values else norms
        total = torch.linalg.vector_norm(found.to(self._type)).item()
        if math.isfinite(total):
            return GradientStatus(total)
        return GradientStatus(total, self._first_at_fault(values))

    def clip(self, status: GradientStatus, max_norm: float) -> None:
        """Scale all gradients so that together they measure no more than `max_norm`."""
        total = torch.tensor(status.norm, dtype=self._type, device=self._device)
        torch.nn.utils.clip_grads_with_norm_(self._held, max_norm, total)

    def no_norms(self) -> Tensor:
        """What a worker tells that holds no gradients that count; float64."""
        return torch.zeros(len(self._names), dtype=torch.float64, device=self._device)

    def own_norms(self) -> Tensor:
        """Of every parameter of the model, 0 for what others tell; float64."""
        norms = self.no_norms()
        grads = [_values(p.grad) for p in self._counted if p.grad is not None]
        found = iter(torch._foreach_norm(grads) if grads else ())
        own = [self._none if p.grad is None else next(found) for p in self._counted]
        if own:
            norms.index_copy_(0, self._rows, torch.stack(own).double())
        return norms

    def _first_at_fault(self, norms: list[float]) -> str:
        """Where no single gradient is, the largest, which made the sum overflow."""
        for name, norm in zip(self._names, norms, strict=True):
            if not math.isfinite(norm):
                return name
        return self._names[norms.index(max(norms))]


def _values(grad: Tensor) -> Tensor:
    """What a gradient's norm is the norm of; an embedding's may be sparse."""
    return grad.coalesce().values() if grad.is_sparse else grad
