"""Whether reading from the cache is faster than computing: both are measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Final, NamedTuple

_MOST: Final = 1.0  # seconds of reading for each second of computing
_NUM_TRIALS: Final = 3
_NUM_LATEST: Final = 16


class CacheCosts(NamedTuple):
    """What the cache takes for a microbatch, as measured so far.

    Args:
        boundary: the layers whose outputs are kept; 0: none.
        read_s: seconds of reading them.
        write_s: seconds of storing outputs.
    """

    boundary: int = 0
    read_s: float = 0.0
    write_s: float = 0.0

    def prefix_s(self, frozen_s: Sequence[float]) -> float:
        """Return the seconds of a microbatch's frozen layers in the next epoch.

            the boundary stays    ├ read ┤
            it moves              ├ read ┤├ the layers behind it ┤├ store ┤
            nothing is kept       ├ all layers                   ┤├ store ┤

        Args:
            frozen_s: seconds of the forward of each frozen layer.
        """
        computes_s = sum(frozen_s)
        if not 0 < self.boundary <= len(frozen_s):
            return computes_s + self.write_s
        behind_s = sum(frozen_s[self.boundary :])
        reads_s = min(self.read_s + behind_s, computes_s)
        return reads_s + (self.write_s if len(frozen_s) > self.boundary else 0.0)


class CacheMode(Enum):
    """What a run does with the frozen layers of a batch."""

    MEASURING = "measuring"
    READS = "reads"
    COMPUTES = "computes"


@dataclass(slots=True)
class Payoff:
    """Seconds of one microbatch, for one frozen prefix.

    Reading pays after some microbatches whose median says so. It is measured on: once
    it takes longer than computing does, it is given up.

    Attributes:
        mode: what to do.
    """

    mode: CacheMode = CacheMode.MEASURING
    _computed: list[float] = field(default_factory=list)
    _read: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_LATEST))

    @property
    def compute_s(self) -> float:
        """The seconds of computing."""
        return median(self._computed)

    @property
    def read_s(self) -> float:
        """The seconds of reading."""
        return median(self._read)

    def add_trial(self, compute_s: float, read_s: float) -> bool:
        """Add what one microbatch took both ways; return whether that decides."""
        self._computed.append(compute_s)
        self._read.append(read_s)
        if len(self._computed) < _NUM_TRIALS:
            return False
        pays = self.read_s <= _MOST * self.compute_s
        self.mode = CacheMode.READS if pays else CacheMode.COMPUTES
        return True

    def add_read(self, read_s: float) -> bool:
        """Add what reading took once more; return whether it is given up."""
        self._read.append(read_s)
        if len(self._read) == _NUM_LATEST and self.read_s > _MOST * self.compute_s:
            self.mode = CacheMode.COMPUTES
        return self.mode is CacheMode.COMPUTES
