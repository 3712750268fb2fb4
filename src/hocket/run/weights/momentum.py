"""A net whose weights follow another net's by a moving average.

Sources: He et al., arXiv:1911.05722 (MoCo), eq. 2; Grill et al., arXiv:2006.07733
(BYOL), eq. 1, whose momentum rises from step to step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.errors import ConfigError, ModelError


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


class Follower:
    """Weights that follow others.

    Step t's move reads the followed weights after their update of step t. Where their
    next update comes first, it keeps a copy for that move:

        followed    U of 0 ── U of 1 ───────────┐
                              └ keeps a copy    │
        follower                     U of 0 ── U of 1

    Args:
        momentum: the momentum of their moves.
        own: the parameters that follow, by name.
        followed: the followed parameters, by the same names.
        stage_of: the stage of each followed parameter, by name; may be left out where
            no next update comes first.
    """

    def __init__(
        self,
        momentum: Momentum,
        own: Mapping[str, Tensor],
        followed: Mapping[str, Tensor],
        stage_of: Mapping[str, int] | None = None,
    ) -> None:
        self.own = own
        self.followed = followed
        self._momentum = momentum
        self._stage_of = {} if stage_of is None else stage_of
        self._lock = threading.Lock()  # the updates may be in two lanes
        self._next: int | None = None  # the step whose move comes next
        self._kept: dict[int, dict[str, Tensor]] = {}  # by step

    def update(self, step: int) -> None:
        """Move them, once those that they follow are updated."""
        with self._lock:
            followed = {**self.followed, **self._kept.pop(step, {})}
            self._momentum.update(step, self.own, followed)
            self._next = step + 1

    def before_update_of(self, stage: int, step: int) -> None:
        """Keep the weights of a followed stage where a move has not read them yet.

        Args:
            stage: the stage that is about to be updated.
            step: its step.
        """
        with self._lock:
            if self._next is None:
                self._next = step
            if self._next >= step:
                return
            kept = self._kept.setdefault(step - 1, {})
            for name, other in self._stage_of.items():
                if other == stage:
                    kept[name] = self.followed[name].detach().clone()


def follow(
    momentum: Momentum,
    own: Mapping[str, Tensor],
    held: Mapping[int, Mapping[str, Tensor]],
    where: str,
) -> Follower:
    """Let the parameters of one stage follow those of others.

    Args:
        momentum: the momentum of their moves.
        own: the stage's parameters, by name.
        held: the parameters of the stages that it follows, by stage and name.
        where: names the stage in errors.

    Raises:
        ModelError: the stages that it follows lack one of its parameters.
    """
    followed = {name: x for named in held.values() for name, x in named.items()}
    for name in own:
        if name not in followed:
            listed = ", ".join([*followed][:5])
            raise ModelError(
                f"{where} has the parameter {name}, which the stages that it follows "
                f"({', '.join(map(str, held))}) lack; they have {listed}, ...: cut "
                "both nets at the same modules"
            )
    stage_of = {name: stage for stage, named in held.items() for name in named}
    return Follower(
        momentum,
        own,
        {name: followed[name] for name in own},
        {name: stage_of[name] for name in own},
    )
