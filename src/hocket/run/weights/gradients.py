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
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from hocket.model.trace.local import is_sharded, is_split, local
from hocket.run.comm.all_sum import AllSum
from hocket.run.device.copies import CopyEvent, copies_of
from hocket.run.device.late import Late
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


@dataclass(eq=False)
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
        is_alone: whether there are no other workers that rates would travel to.
        num_parts: the workers that hold each gradient together. They post the squares
            of their parts' norms, whose sums are the squares of the whole norms.
        part: this worker's place among them.
    """

    names: tuple[str, ...]
    held: Mapping[str, nn.Parameter]
    counted: frozenset[str]
    all_workers: AllSum | None
    device: torch.device
    dtype: torch.dtype
    members: Collection[str] | None = None
    rates: LiveRates | None = None
    is_alone: bool = False
    num_parts: int = 1
    part: int = 0

    def __post_init__(self) -> None:
        """Note where in the norms those of this worker are."""
        self._held = tuple(self.held.values())
        numbered = [*enumerate(self.names)]
        self._places = [(i, self.held[x]) for i, x in numbered if x in self.counted]
        self._type = self.dtype.to_real()  # norms of complex gradients are real
        # Made once: indexing with lists makes the host wait for a GPU, each time.
        self._rows = torch.tensor(
            [i for i, _ in self._places], dtype=torch.long, device=self.device
        )
        places = [i for i, x in numbered if x in (self.members or self.names)]
        selects = len(places) < len(numbered)
        self._members = torch.tensor(places, dtype=torch.long) if selects else None
        self._none = torch.tensor(_NONE, dtype=self._type, device=self.device)
        num_rates = 0 if self.rates is None or self.is_alone else self.rates.num_numbers
        self._rates_here = torch.empty(
            num_rates, dtype=torch.float64, pin_memory=self.device.type != "cpu"
        )
        self._length = len(self.names) + num_rates

    @property
    def allows_any_order(self) -> bool:
        """Whether workers may post several such groups in different orders."""
        return self.all_workers is None or self.all_workers.allows_any_order

    def post(self, step: int, norms: Tensor | None = None) -> Late[GradientStatus]:
        """Send the norms; every worker must call this with its gradients complete.

        Args:
            step: the same on every worker.
            norms: the result of `own_norms`, if it was called before.

        Returns:
            The status of all workers' gradients, to be looked at before the next
            `post`; not so of the only worker, which waits for no more than these norms.
            It raises a WaitError if another worker did not post.
        """
        norms = self.own_norms() if norms is None else norms
        if self.all_workers is not None:
            norms = norms.clone()  # the sum replaces them
            self.all_workers.post(norms, step)
            return Late(partial(self._status_of_sum, norms, self.all_workers))
        fault, copies = self.rate_fault(), copies_of(self.device)
        if copies is None:
            return Late(partial(self.status_of, norms, fault))
        host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=copies.pins)
        event = copies.to_host((host,), (norms,))
        return Late(partial(self._status_of_copy, host, event, fault))

    def _status_of_sum(self, norms: Tensor, workers: AllSum) -> GradientStatus:
        workers.wait()
        norms = norms.cpu()  # the host waits for a GPU once
        rates = norms[len(self.names) :].tolist()
        fault = "" if self.rates is None else self.rates.fault(rates)
        return self.status_of(norms, fault)

    def _status_of_copy(
        self, host: Tensor, event: CopyEvent, rate_fault: str
    ) -> GradientStatus:
        event.synchronize()
        return self.status_of(host, rate_fault)

    def status_of(self, norms: Tensor, rate_fault: str = "") -> GradientStatus:
        """Return the status that follows from complete norms."""
        norms = norms[: len(self.names)].cpu()
        if self.num_parts > 1:
            norms = torch.where(norms == _NONE, norms, norms.sqrt())
        values = norms.tolist()
        # Selecting some costs several times as much as the rest.
        found = norms if self._members is None else norms[self._members]
        found = found[found != _NONE] if _NONE in values else found
        total = torch.linalg.vector_norm(found.to(self._type)).item()
        if math.isfinite(total):
            return GradientStatus(total, rate_fault=rate_fault)
        return GradientStatus(total, self._first_at_fault(values), rate_fault)

    def total_of(self, norms: Tensor) -> Tensor:
        """Return the norm of this worker's gradients together; the host does not wait.

        Args:
            norms: the result of `own_norms`, if this is the only worker.
        """
        places = [i for i, p in self._places if p.grad is not None]
        if len(places) == len(self._places):
            found = norms.index_select(0, self._rows)
        else:
            found = torch.stack([norms[i] for i in places] or [self._none.double() * 0])
        total: Tensor = torch.linalg.vector_norm(found.to(self._type))
        return total

    def clip(self, norm: float | Tensor, max_norm: float) -> None:
        """Scale all gradients such that their total norm is at most `max_norm`.

        Args:
            norm: what it is now; a tensor where the host does not know it yet.
            max_norm: the most that it may be.
        """
        if not isinstance(norm, Tensor):
            # Unlike torch.tensor, this copies nothing to a GPU.
            norm = torch.full((), norm, dtype=self._type, device=self.device)
        if not any(map(is_sharded, self._held)):
            torch.nn.utils.clip_grads_with_norm_(self._held, max_norm, norm)
            return
        # It would multiply DTensors by a plain tensor, which they refuse.
        grads = [local(p.grad) for p in self._held if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def rate_fault(self) -> str:
        """Describe how this worker's learning rates differ between its stages."""
        return "" if self.rates is None else self.rates.fault(self.rates.numbers())

    def no_norms(self) -> Tensor:
        """Return the norms of a worker without counted gradients: zeros, float64."""
        return torch.zeros(self._length, dtype=torch.float64, device=self.device)

    def own_norms(self) -> Tensor:
        """Return a norm per parameter of the model, 0 for other workers'; float64.

        The learning rates are behind them, where there are other workers.
        """
        norms = self.no_norms()
        if self.rates is not None and len(self._rates_here):
            # Free again: the host has read the norms of the step before.
            numbers = torch.tensor(self.rates.numbers(), dtype=torch.float64)
            self._rates_here.copy_(numbers)
            norms[len(self.names) :].copy_(self._rates_here, non_blocking=True)
        grads = [_values(p.grad) for _, p in self._places if p.grad is not None]
        found = iter(torch._foreach_norm(grads) if grads else ())
        # Of a sum over parts, one of them says that there is no gradient.
        none = self._none if not self.part else torch.zeros_like(self._none)
        own = [none if p.grad is None else next(found) for _, p in self._places]
        if own:
            posted = torch.stack(own).double()
            if self.num_parts > 1:
                # Of what all hold, each adds a share, and all see what is not finite.
                shares = [1 if is_split(p) else self.num_parts for _, p in self._places]
                squares = posted.square() / posted.new_tensor(shares)
                posted = torch.where(posted == _NONE, posted, squares)
            norms.index_copy_(0, self._rows, posted)
        return norms

    def _first_at_fault(self, norms: list[float]) -> str:
        """Return the first name without a finite norm, or the one with the largest."""
        for name, norm in zip(self.names, norms, strict=True):
            if not math.isfinite(norm):
                return name
        return self.names[norms.index(max(norms))]


def _values(grad: Tensor) -> Tensor:
    """Return the values that a gradient's norm is computed from; it may be sparse."""
    return grad.coalesce().values() if grad.is_sparse else local(grad)
