"""In which type the forward computes, and how small gradients survive a short one.

bfloat16 has float32's range, so gradients survive as they are. float16 has not: the
loss is scaled up before the backward, and the gradients down again before the update.
Where that was too much, some gradient is infinite, the step is skipped, and the scale
halved; on all workers at once, for they know of all gradients
(`hocket.run.weights.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch
from torch import Tensor, nn


class Precision(Enum):
    """What autocast computes in. Weights, and what updates them, keep their types."""

    FLOAT32 = "float32"  # no autocast: everything in the types that it has
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """What to compute a forward in; to be entered again and again, never nested."""
        if self is Precision.FLOAT32:
            return nullcontext()
        return torch.autocast(device.type, getattr(torch, self.value))


class LossScale:
    """The factor of the loss, which all workers keep alike.

    torch's scaler looks for infinities in an optimizer's gradients. Here it looks at
    one number, the witness, whose gradient is infinite on every worker as soon as any
    gradient of any worker is.

    Args:
        scaler: torch's; its state is the scale's.
        device: where the scale is kept.
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
        """Learn from a step: too large a factor is halved, a good one may grow."""
        found = math.inf if overflowed else 0.0
        self._witness.grad = torch.full_like(self._witness, found)
        self.scaler.unscale_(self._optimizer)
        self.scaler.update()
