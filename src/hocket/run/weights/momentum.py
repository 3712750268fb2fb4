"""A net whose weights follow another net's: by a moving average, or by copies.

Sources: He et al., arXiv:1911.05722 (MoCo), eq. 2; Grill et al., arXiv:2006.07733
(BYOL), eq. 1, whose momentum rises along a cosine (section 3.3); Mnih et al., Nature
518 (DQN), whose target network is copied every so many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from hocket.errors import ConfigError

_NUM_COMPARED: Final = 8  # steps of a function

BuffersName: TypeAlias = Literal["own", "copied", "averaged"]


@dataclass(frozen=True, slots=True)
class Momentum:
    """Moves each parameter to `m * parameter + (1 - m) * followed parameter`.

    With `final`, update k (from 0) has the momentum

        m = final - (final - value) * (cos(pi * k / num_steps) + 1) / 2

    and every update from `num_steps` on has `final`. Steps whose update is skipped
    count.

    Args:
        value: m, from 0 to 1; or a function of the step that returns it.
        final: m after `num_steps` updates; constant when not given.
        num_steps: the updates over which m goes from `value` to `final`.
        buffers: what becomes of buffers that training changes, such as the statistics
            of a batch norm: "own", which only the net's own forwards change; "copied"
            from the followed net at every update; or "averaged" as parameters are,
            where they are floating-point, and copied else.

    Raises:
        ConfigError: a momentum is below 0 or above 1; or one of `final` and `num_steps`
            is missing, or given beside a function; or there are no such buffers.
    """

    value: float | Callable[[int], float]
    final: float | None = None
    num_steps: int | None = None
    buffers: BuffersName = "own"

    def __post_init__(self) -> None:
        _check_buffers(self.buffers)
        if (self.final is None) != (self.num_steps is None):
            raise ConfigError(
                f"final is {self.final} and num_steps is {self.num_steps}: give both, "
                "for a momentum that changes, or neither"
            )
        if self.num_steps is not None:
            _check_num_steps(self.num_steps)
        if not callable(self.value):
            _check_range(self.value, "the momentum")
        elif self.final is not None:
            raise ConfigError(
                f"the momentum is a function of the step, and final is {self.final}: "
                "leave out final and num_steps, or give a number to begin with"
            )
        if self.final is not None:
            _check_range(self.final, "the final momentum")

    @property
    def text(self) -> str:
        """Text that all workers must have alike; of a function, its first values."""
        if not callable(self.value):
            return repr(self)
        values = " ".join(f"{self.at(step):.6g}" for step in range(_NUM_COMPARED))
        return f"{values} {self.buffers}"

    def at(self, step: int) -> float:
        """Return the momentum of one step's update.

        Raises:
            ConfigError: a function has returned one below 0 or above 1.
        """
        if callable(self.value):
            found = self.value(step)
            _check_range(found, f"the momentum of step {step}")
            return found
        if self.final is None or self.num_steps is None:
            return self.value
        angle = math.pi * min(step, self.num_steps) / self.num_steps
        return self.final - (self.final - self.value) * (math.cos(angle) + 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class CopyEvery:
    """Copies the followed weights behind every `num_steps`-th update.

    Between copies the weights stay as they are (a hard target network). Steps whose
    update is skipped count; a copy behind one is made, of the weights as they are.

    Args:
        num_steps: updates from one copy to the next; the first copy is behind update
            `num_steps - 1`, counted from 0.
        buffers: as for `Momentum`; "copied" and "averaged" both copy them with the
            weights.

    Raises:
        ConfigError: `num_steps` is below 1, or there are no such buffers.
    """

    num_steps: int
    buffers: BuffersName = "own"

    def __post_init__(self) -> None:
        _check_buffers(self.buffers)
        _check_num_steps(self.num_steps)

    @property
    def text(self) -> str:
        """Text that all workers must have alike."""
        return repr(self)

    def at(self, step: int) -> float:
        """Return the momentum of one step's update: 0 for a copy, else 1."""
        return 1.0 if (step + 1) % self.num_steps else 0.0


FollowerUpdate: TypeAlias = Momentum | CopyEvery


def _check_range(momentum: float, what: str) -> None:
    if not 0.0 <= momentum <= 1.0:
        raise ConfigError(
            f"{what} is {momentum}: it must be from 0 (a copy of the followed weights) "
            "to 1 (never moved)"
        )


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ConfigError(f"num_steps is {num_steps}: give at least 1")


def _check_buffers(buffers: str) -> None:
    known = get_args(BuffersName)
    if buffers not in known:
        raise ConfigError(f"buffers is {buffers!r}: give one of {', '.join(known)}")
