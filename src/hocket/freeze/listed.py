"""Freezes as many layers as a list says: a schedule made by hand.

decisions         1  2  3  4  5
{2: 6, 4: 8}      0  6  6  8  8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hocket.freeze.policy import LayerObservation, Planned, refuse


@dataclass(frozen=True, slots=True)
class Listed(Planned):
    """From the given decisions on, as many layers are frozen.

    Args:
        num_frozen: the layers that are frozen, by the number of the decision (from 1)
            that freezes them: the number of epochs that have ended, unless
            `every_steps` is given.
        every_steps: steps between decisions; the ends of epochs when not given.
        layers: the modules that count as layers, as "encoder.layers.*".

    Raises:
        ConfigError: a number is out of its range.

    >>> policy = Listed({2: 6, 4: 8})
    >>> [policy.decide(None, LayerObservation(e, e, 12, 0)) for e in range(1, 6)]
    [0, 6, 6, 8, 8]
    """

    num_frozen: Mapping[int, int]

    def __post_init__(self) -> None:
        faults = self.interval_faults()
        if not self.num_frozen:
            faults.append("num_frozen is empty: say when layers freeze, as {2: 6}")
        faults += [
            f"num_frozen has {number}: {layers}: decisions count from 1, layers from 0"
            for number, layers in self.num_frozen.items()
            if number < 1 or layers < 0
        ]
        refuse(faults)

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Return what the list says, and no more layers than there are."""
        begun = [number for number in self.num_frozen if number <= seen.number]
        listed = self.num_frozen[max(begun)] if begun else 0
        return min(listed, seen.num_layers)
