"""How a net's weights follow another net's: a moving average, as momentum teachers do.

Sources: He et al., arXiv:1911.05722 (MoCo), eq. 2; Grill et al., arXiv:2006.07733
(BYOL), eq. 1, whose momentum rises from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Momentum:
    """Moves each parameter to `m * parameter + (1 - m) * followed parameter`.

    Args:
        value: m, or a function of the step that gives it; from 0 to 1.
    """

    value: float | Callable[[int], float]

    def at(self, step: int) -> float:
        """The momentum of one step's update.

        Raises:
            RecipeError: it is below 0 or above 1.
        """
        found = self.value(step) if callable(self.value) else self.value
        if not 0.0 <= found <= 1.0:
            raise RecipeError(
                f"the momentum of step {step} is {found}: it must be from 0 (a copy of "
                "the followed weights) to 1 (never moved)"
            )
        return found

    @torch.no_grad()
    def update(
        self, step: int, own: Mapping[str, Tensor], followed: Mapping[str, Tensor]
    ) -> None:
        """Move parameters in place.

        Args:
            step: of the update.
            own: what follows, by name.
            followed: at least the same names.

        Raises:
            RecipeError: the momentum is below 0 or above 1.
        """
        m = self.at(step)
        for name, parameter in own.items():
            parameter.mul_(m).add_(followed[name], alpha=1.0 - m)
