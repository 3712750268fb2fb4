"""Cuts a row of layers into stages, with the fastest possible slowest stage.

    layers   3  1  4 │ 1  5 │ 9        3 stages, the slowest takes 9
    stage       8    │   6  │ 9

A boundary that more bytes cross than the narrowest one costs the stages beside it time:
each takes half as much longer as the messages there and back do.

    layers     3   1   4   1 │ 5 │ 9
    messages     1   1   6   1   1
    stage            9         5   9

Where devices differ, a stage takes as many times longer as its device does.

The result is exact: dynamic programming covers all cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np

from hocket.core.costs import Link
from hocket.core.timelines.arrays import Floats, Ints
from hocket.errors import ShapeError
from hocket.planner.work import LayerCost


class Balancer:
    """Cuts one row of layers into different numbers of stages.

    Args:
        layer_s: seconds of each layer.
        message_s: seconds of the messages, there and back, across the boundary before
            each layer but the first. Only differences count: boundaries that are all
            as wide cost nothing.
    """

    def __init__(self, layer_s: Sequence[float], message_s: Sequence[float]) -> None:
        """Compute the seconds of every possible stage."""
        self.num_layers = len(layer_s)
        until = np.array([0.0, *accumulate(layer_s)])
        least_s = min(message_s, default=0.0)
        wider_s = np.array([0.0, *((s - least_s) / 2 for s in message_s), 0.0])
        stage_s = until[None, :] - until[:, None] + wider_s[:, None] + wider_s[None, :]
        places = np.arange(self.num_layers + 1)
        is_stage = places[:, None] < places[None, :]
        self._stage_s: Floats = np.where(is_stage, stage_s, inf)  # [begin, end]
        self._slowest_s = [np.full(self.num_layers + 1, inf), self._stage_s[0]]
        self._cuts: dict[tuple[float, ...], tuple[int, ...]] = {}

    @classmethod
    def of(cls, layers: Sequence[LayerCost], link: Link) -> Balancer:
        """Cut these layers, with messages over this link between any two stages."""
        return cls(
            [layer.forward_s + layer.backward_s for layer in layers],
            [
                link.occupied_s(layer.received_bytes + layer.received_grad_bytes)
                for layer in layers[1:]
            ],
        )

    def cut(self, num_stages: int, slowness: Sequence[float] = ()) -> tuple[int, ...]:
        """Return the boundaries with the fastest possible slowest stage.

        Dynamic programming over (stages, layers), in `num_stages * num_layers^2` steps.
        Of the cuts that are equally good, the one whose stages differ least (the
        smallest sum of squares) is taken.

        Args:
            num_stages: the number of stages, each of at least one layer.
            slowness: how many times longer than the layers' seconds each stage's device
                takes; empty if all devices are alike.

        Returns:
            The layers at which stages 1, 2, ... begin.

        Raises:
            ShapeError: there are fewer layers than stages.
        """
        if not 1 <= num_stages <= self.num_layers:
            raise ShapeError(
                f"{self.num_layers} layers cannot be cut into {num_stages} stages; 1 "
                f"to {self.num_layers} are possible"
            )
        key = tuple(slowness) or (1.0,) * num_stages
        if key not in self._cuts:
            self._cuts[key] = self._smoothest(key)
        return self._cuts[key]

    def _slowest(self, slowness: tuple[float, ...]) -> float:
        """Return the least time of the slowest stage."""
        num_stages = len(slowness)
        if {*slowness} != {1.0}:
            slowest_s = self._stage_s[0] * slowness[0]
            for factor in slowness[1:]:
                both = np.maximum(slowest_s[:, None], self._stage_s * factor)
                slowest_s = both.min(axis=0)
            return float(slowest_s[-1])
        while len(self._slowest_s) <= num_stages:
            before = self._slowest_s[-1][:, None]
            self._slowest_s.append(np.maximum(before, self._stage_s).min(axis=0))
        return float(self._slowest_s[num_stages][-1])

    def _smoothest(self, slowness: tuple[float, ...]) -> tuple[int, ...]:
        """Return, of the cuts that are equally good, the one with the least squares."""
        slowest_s = self._slowest(slowness)
        squares = {x: self._squares(x, slowest_s) for x in {*slowness}}
        best: Floats = squares[slowness[0]][0]
        came_from: list[Ints] = []
        for factor in slowness[1:]:
            joined = best[:, None] + squares[factor]
            came_from.append(joined.argmin(axis=0))
            best = joined.min(axis=0)
        boundaries: list[int] = []
        end = self.num_layers
        for choice in reversed(came_from):
            end = int(choice[end])
            boundaries.append(end)
        return tuple(reversed(boundaries))

    def _squares(self, factor: float, slowest_s: float) -> Floats:
        """Return the squares of stages' seconds on a device, `inf` for longer ones."""
        stage_s = self._stage_s * factor
        with np.errstate(over="ignore"):
            return np.where(stage_s <= slowest_s, stage_s * stage_s, inf)
