"""The type that forwards compute in, and the loss scale for float16.

bfloat16 has float32's range, so gradients survive as they are. float16 has not: the
loss is scaled up before the backward, and the gradients down again before the update.
If the scale is too large, some gradient is infinite, the step is skipped, and the scale
is halved; on all workers at once, since each has the norms of all gradients
(`hocket.run.weights.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Precision(Enum):
    """The type that autocast computes in. Weights and updates keep their types."""

    FLOAT32 = "float32"  # no autocast
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return autocast's context; re-entered for each forward, never nested."""
        if self is Precision.FLOAT32:
            return nullcontext()
        return torch.autocast(device.type, getattr(torch, self.value))

    def computing(
        self, device: torch.device, function: Callable[_P, _T]
    ) -> Callable[_P, _T]:
        """Return a function that computes in this type; itself without autocast."""
        if self is Precision.FLOAT32:
            return function
        computed: Callable[_P, _T]
        computed = torch.autocast(device.type, getattr(torch, self.value))(function)
        return computed


class LossScale:
    """The loss scale for float16, equal on all workers.

    torch's scaler looks for infinities in an optimizer's gradients. Here it looks at
    one number, the witness, whose gradient is infinite on every worker as soon as any
    gradient of any worker is.

    Args:
        scaler: torch's scaler, which keeps the state.
        device: the scale's device.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._witness = nn.Parameter(torch.zeros((), device=device))
        self._optimizer = torch.optim.SGD([self._witness], lr=0.0)
        scaler.scale(self._witness.detach())  # until then it has no state

    @property
    def value(self) -> float:
        """The factor of this step's loss."""
        return self.scaler.get_scale()

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Divide gradients by the factor, in place."""
        if grads:
            torch._foreach_mul_(list(grads), 1.0 / self.value)

    def update(self, *, overflowed: bool) -> None:
        """Halve the factor after an overflow; raise it after many good steps."""
        found = math.inf if overflowed else 0.0
        self._witness.grad = torch.full_like(self._witness, found)
        self.scaler.unscale_(self._optimizer)
        self.scaler.update()
