"""Predicts how long a change of layout takes, from those that were measured.

    seconds = fixed + bytes that move / bandwidth

The fixed part (cutting the net again, connections) is the mean of what the measured
transitions took beside their messages. No microbatch is under way, since a step ends
before the layout changes, so none adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Final

from hocket.core.costs import Link
from hocket.freeze.shapes import Frozen

_FIRST_S: Final = 2.0  # assumed until one is measured


@dataclass(slots=True)
class TransitionCosts:
    """The measured transitions of a run.

    Args:
        link: between devices.
    """

    link: Link
    _fixed_s: list[float] = field(default_factory=list)

    def add(self, moved_bytes: int, seconds: float) -> None:
        """Add a transition that was measured."""
        self._fixed_s.append(max(0.0, seconds - self.link.occupied_s(moved_bytes)))

    def seconds(self, moved_bytes: int, unknown_s: float = _FIRST_S) -> float:
        """Return the predicted seconds of a transition.

        Args:
            moved_bytes: the bytes that workers receive.
            unknown_s: the fixed part until one was measured.
        """
        fixed_s = mean(self._fixed_s) if self._fixed_s else unknown_s
        return fixed_s + self.link.occupied_s(moved_bytes)


def moved_bytes(
    model: Frozen,
    before: Sequence[range],
    after: Sequence[range],
    num_workers: int,
) -> int:
    """Return the bytes that workers receive which they did not hold.

    Layers that train move with their optimizer's state.

    Args:
        model: the layers, and how many of them are frozen afterwards.
        before: the layers of each device of a replica.
        after: the layers of each device of a replica, afterwards.
        num_workers: all workers; a worker's device is its rank modulo the devices.
    """
    total = 0
    for rank in range(num_workers):
        had, needs = before[rank % len(before)], after[rank % len(after)]
        weights = {
            each.name: each.num_bytes
            + (0 if layer < model.num_frozen else each.optimizer_bytes)
            for layer in needs
            if layer not in had
            for each in model.layers[layer].weights
        }
        total += sum(weights.values())
    return total
