"""Freezes as many layers as a list says: a schedule made by hand.

decisions         1  2  3  4  5
{2: 6, 4: 8}      0  6  6  8  8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hocket.freeze.plain_numbers import is_whole
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
        ConfigError: an argument is of another type, or out of its range.

    >>> policy = Listed({2: 6, 4: 8})
    >>> [policy.decide(None, LayerObservation(e, e, 12, 0)) for e in range(1, 6)]
    [0, 6, 6, 8, 8]
    """

    num_frozen: Mapping[int, int]

    def __post_init__(self) -> None:
        given: object = self.num_frozen
        if not isinstance(given, Mapping) or not given:
            fault = f"num_frozen is {given!r}: say when layers freeze, as {{2: 6}}"
            refuse([*self.interval_faults(), fault])
        wrong = [
            f"num_frozen has {number!r}: {layers!r}: decisions count from 1, layers "
            "from 0, as {2: 6}"
            for number, layers in self.num_frozen.items()
            if not (is_whole(number, 1) and is_whole(layers, 0))
        ]
        refuse([*self.interval_faults(), *wrong])

    def decide(self, state: None, seen: LayerObservation) -> int:
        """Return what the list says, and no more layers than there are."""
        begun = [number for number in self.num_frozen if number <= seen.number]
        listed = self.num_frozen[max(begun)] if begun else 0
        return min(listed, seen.num_layers)
