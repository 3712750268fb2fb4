"""Learning-rate discount: smaller first updates, where stale gradients harm most.

On a quadratic of curvature `c`, gradient descent of rate `lr` is stable for `lr * c` up
to 2 without a delay, and up to `2 sin(pi / (2 (2 d + 1)))` with one: 1, 0.62, 0.45 for
`d` = 1, 2, 3. That is about `2 / (1 + d)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor

from hocket.errors import ConfigError
from hocket.run.weights.correction.correction import Correction, CorrectionState

# How long training will be is not known here: this is far beyond the beginning of any,
# where curvature changes fast, and little of all but the shortest.
NUM_DISCOUNTED: Final = 1000


@final
class LrDiscount(Correction):
    """Divides the learning rates by `(1 + delay) ** (1 - t / n)` at update `t`.

    From update `n` on they are what the optimizer and its schedule say. Nothing else
    sees the discounted rates: they are put back before the schedule steps. Keeps one
    number.

    Source: after Yang et al., "PipeMare", arXiv:1910.05124, technique 1, known here
    from descriptions: `lr / tau ** (1 - min(t / n, 1))`, with an `n` that follows from
    the first part of training, before the rate falls. Ours is `1 + delay` for `tau`,
    which would not discount a delay of 1.

    Args:
        optimizer: its parameter groups have a rate `lr`.
        delay: the stage's delay in updates, above 0.
        num_updates: `n`, the updates over which the discount fades; 1 or more.

    Raises:
        ConfigError: a group has none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        delay: int,
        num_updates: int = NUM_DISCOUNTED,
    ) -> None:
        for group in optimizer.param_groups:
            if not isinstance(group.get("lr"), int | float | Tensor):
                raise ConfigError(
                    f"correction='lr-discount' needs learning rates, and "
                    f"{type(optimizer).__name__} has lr={group.get('lr')!r}: give it "
                    "one, or take correction='error-feedback'"
                )
        self._optimizer = optimizer
        self._delay = delay
        self._num_discounted = num_updates
        self._num_updates = 0

    def step(self, step: Callable[[], object]) -> None:
        """Update with smaller rates."""
        left = 1.0 - min(self._num_updates / self._num_discounted, 1.0)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] / (1 + self._delay) ** left
        try:
            step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._num_updates += 1

    def predicted(self) -> None:
        """Return None: forwards read the weights as they are."""

    def state_dict(self) -> CorrectionState:
        """Return the number of updates."""
        return {"num_updates": self._num_updates, "kept": {}}

    def load_state_dict(self, state: CorrectionState) -> None:
        """Restore the number of updates."""
        self._num_updates = state["num_updates"]
