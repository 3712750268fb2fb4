"""A net whose weights follow another net's by a moving average.

Sources: He et al., arXiv:1911.05722 (MoCo), eq. 2; Grill et al., arXiv:2006.07733
(BYOL), eq. 1, whose momentum rises from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Momentum:
    """Moves each parameter to `m * parameter + (1 - m) * followed parameter`.

    Args:
        value: m, from 0 to 1, or a function of the step that returns it.
    """

    value: float | Callable[[int], float]

    def at(self, step: int) -> float:
        """Return the momentum of one step's update.

        Raises:
            ConfigError: the momentum is below 0 or above 1.
        """
        found = self.value(step) if callable(self.value) else self.value
        if not 0.0 <= found <= 1.0:
            raise ConfigError(
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
            step: the update's step.
            own: the parameters to move, by name.
            followed: the followed parameters, by the same names.

        Raises:
            ConfigError: the momentum is below 0 or above 1.
        """
        m = self.at(step)
        for name, parameter in own.items():
            parameter.mul_(m).add_(followed[name], alpha=1.0 - m)
