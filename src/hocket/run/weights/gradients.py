"""Norms of all gradients of the model, summed over the workers.

Each worker posts the norms of the gradients that it holds, and all sum them
(run/comm/all_sum.py). A sum with zeros is exact, so every worker gets the same norms of
all parameters:

    parameter    a.weight   a.bias │ b.weight   b.bias      in the uncut model's order
    device 0        3.1       0.2  │     0         0
    device 1         0         0   │    nan       0.7
    all             3.1       0.2       nan       0.7       b.weight is at fault

From these every worker computes whether there may be an update, and the total norm,
which is what `torch.nn.utils.get_total_norm` finds for the uncut model, to the last bit
where the gradients are. The stages' learning rates travel behind the norms
(`live_rates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from hocket.run.comm.all_sum import AllSum
from hocket.run.weights.live_rates import LiveRates

_NONE: Final = -1.0  # posted instead of a norm: the parameter got no gradient


@dataclass(frozen=True, slots=True)
class GradientStatus:
    """The norm of a step's gradients, and which gradient is not finite.

    Args:
        norm: the norm of all gradients together; not finite if any gradient is not.
        culprit: the first parameter whose gradient is not finite; empty if all are.
        rate_fault: how learning rates differ between stages; empty if they do not.
        unknown: why the norm is not known; empty if it is.
    """

    norm: float
    culprit: str = ""
    rate_fault: str = ""
    unknown: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether the weights may be updated."""
        return bool(self.unknown) or math.isfinite(self.norm)


class Gradients:
    """The gradients that one worker holds, as a part of the model's.

    Args:
        names: all trained parameters, in the uncut model's order.
        held: the trained parameters on this worker, by name.
        counted: the names whose norm this worker posts: of a shared weight, and of
            replicas, several workers hold the same gradient, and one posts it.
        all_workers: sums the norms; None if this is the only worker.
        device: the gradients' device.
        dtype: a type that holds all gradients of the model.
        members: the names whose norms make the total; all when not given. A sum that
            has zeros among its terms may be rounded otherwise.
        rates: the learning rates, which travel behind the norms.
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
        members: Collection[str] | None = None,
        rates: LiveRates | None = None,
    ) -> None:
        self._names = names
        self._held = tuple(held.values())
        selected = [(i, held[name]) for i, name in enumerate(names) if name in counted]
        self._counted = [parameter for _, parameter in selected]
        self._all_workers = all_workers
        self._device = device
        self._type = dtype.to_real()  # norms of complex gradients are real
        # Made once: indexing with lists makes the host wait for a GPU, each time.
        self._rows = torch.tensor(
            [i for i, _ in selected], dtype=torch.long, device=device
        )
        places = [i for i, name in enumerate(names) if name in (members or names)]
        self._members = (
            torch.tensor(places, dtype=torch.long) if len(places) < len(names) else None
        )
        self._none = torch.tensor(_NONE, dtype=self._type, device=device)
        self._norms = torch.zeros(0)
        self._rates = rates
        self._rates_here = torch.empty(
            0 if rates is None else rates.num_numbers,
            dtype=torch.float64,
            pin_memory=device.type != "cpu",
        )
        self._length = len(names) + (0 if rates is None else rates.num_numbers)

    @property
    def allows_any_order(self) -> bool:
        """Whether workers may post several such groups in different orders."""
        return self._all_workers is None or self._all_workers.allows_any_order

    def post(self, step: int, norms: Tensor | None = None) -> None:
        """Send the norms; every worker must call this with its gradients complete.

        Args:
            step: the same on every worker.
            norms: the result of `own_norms`, if it was called before.
        """
        self._norms = self.own_norms() if norms is None else norms
        if self._all_workers is not None:
            self._all_workers.post(self._norms, step)

    def wait(self) -> GradientStatus:
        """Return the status of all workers' gradients; once after each `post`.

        Raises:
            WaitError: another worker did not post.
        """
        norms = self._norms
        if self._all_workers is not None:
            self._all_workers.wait()
        return self.status_of(norms)

    def status_of(self, norms: Tensor) -> GradientStatus:
        """Return the status that follows from complete norms."""
        norms = norms.cpu()  # the host waits for a GPU once
        values, num = norms.tolist(), len(self._names)
        fault = "" if self._rates is None else self._rates.fault(values[num:])
        values = values[:num]
        # Selecting some costs several times as much as the rest.
        found = norms[:num] if self._members is None else norms[self._members]
        found = found[found != _NONE] if _NONE in values else found
        total = torch.linalg.vector_norm(found.to(self._type)).item()
        if math.isfinite(total):
            return GradientStatus(total, rate_fault=fault)
        return GradientStatus(total, self._first_at_fault(values), fault)

    def clip(self, status: GradientStatus, max_norm: float) -> None:
        """Scale all gradients such that their total norm is at most `max_norm`."""
        # Unlike torch.tensor, this copies nothing to a GPU.
        total = torch.full((), status.norm, dtype=self._type, device=self._device)
        torch.nn.utils.clip_grads_with_norm_(self._held, max_norm, total)

    def no_norms(self) -> Tensor:
        """Return the norms of a worker without counted gradients: zeros, float64."""
        return torch.zeros(self._length, dtype=torch.float64, device=self._device)

    def own_norms(self) -> Tensor:
        """Return a norm per parameter of the model, 0 for other workers'; float64.

        The learning rates are behind them.
        """
        norms = self.no_norms()
        if self._rates is not None:
            # Free again: the host has read the norms of the step before.
            numbers = torch.tensor(self._rates.numbers(), dtype=torch.float64)
            self._rates_here.copy_(numbers)
            norms[len(self._names) :].copy_(self._rates_here, non_blocking=True)
        grads = [_values(p.grad) for p in self._counted if p.grad is not None]
        found = iter(torch._foreach_norm(grads) if grads else ())
        own = [self._none if p.grad is None else next(found) for p in self._counted]
        if own:
            norms.index_copy_(0, self._rows, torch.stack(own).double())
        return norms

    def _first_at_fault(self, norms: list[float]) -> str:
        """Return the first name without a finite norm, or the one with the largest."""
        for name, norm in zip(self._names, norms, strict=True):
            if not math.isfinite(norm):
                return name
        return self._names[norms.index(max(norms))]


def _values(grad: Tensor) -> Tensor:
    """Return the values that a gradient's norm is computed from; it may be sparse."""
    return grad.coalesce().values() if grad.is_sparse else grad
