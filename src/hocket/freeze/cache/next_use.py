"""When each sample is used next, which decides what the cache keeps.

    order    7 2 5 0 │ 8 3 6 1 ...     known in advance: it follows from seed and epoch
                 ▲ now                 next uses: 5 at once, 0 then; 7 and 2 last

Source: Belady, "A study of replacement algorithms for a virtual-storage computer"
(IBM Systems Journal 5, 1966): the entry that is used last of all leaves first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hocket.freeze.cache.shard import Key

NEVER: Final = 1 << 62
_EPOCHS_AHEAD: Final = 3


@dataclass(eq=False)
class NextUse:
    """The order of samples over all epochs, and the position in it.

    Times count samples, from the first epoch's first on.

    Args:
        data: the data of keys; entries of other data are not used.
        num_samples: rows of the data set.
        num_used: those of them that an epoch uses: the first ones of its order.
        order: returns an epoch's order of all rows.
    """

    data: int
    num_samples: int
    num_used: int
    order: Callable[[int], NDArray[np.int64]]

    def __post_init__(self) -> None:
        self.now = 0
        self._places: dict[int, NDArray[np.int64]] = {}

    def time_of(self, epoch: int, sample: int) -> int:
        """Return the time at which an epoch has a sample."""
        return epoch * self.num_used + int(self._places_in(epoch)[sample])

    def of(self, key: Key) -> int:
        """Return when an entry is used next, from now on."""
        if key.data != self.data or not 0 <= key.sample < self.num_samples:
            return NEVER
        epoch, place = divmod(self.now, self.num_used)
        for later in range(epoch, epoch + _EPOCHS_AHEAD):
            found = self._places_in(later)[key.sample]
            if found < self.num_used and (later > epoch or found >= place):
                return later * self.num_used + int(found)
        return NEVER

    def _places_in(self, epoch: int) -> NDArray[np.int64]:
        """Return each row's place in an epoch."""
        if epoch not in self._places:
            for old in [*self._places]:
                if old < epoch - _EPOCHS_AHEAD:
                    self._places.pop(old, None)  # another thread may do so, too
            order = self.order(epoch)
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            self._places[epoch] = places
        return self._places[epoch]


class Furthest:
    """Keys by the time of their next use; the furthest is known at once."""

    def __init__(self) -> None:
        self._times: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []  # of negative times, some outdated

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._times)

    def set(self, key: Key, time: int) -> None:
        """Add a key, or move it."""
        self._times[key] = time
        heappush(self._heap, (-time, key))
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(-t, k) for k, t in self._times.items()]
            heapify(self._heap)

    def move(self, key: Key, time: int) -> None:
        """Move a key, if it is among them."""
        if key in self._times:
            self.set(key, time)

    def remove(self, key: Key) -> None:
        """Remove a key, if it is among them."""
        self._times.pop(key, None)

    def last(self) -> tuple[int, Key] | None:
        """Return the key that is used last of all, and when; None for no key."""
        while self._heap:
            time, key = self._heap[0]
            if self._times.get(key) == -time:
                return -time, key
            heappop(self._heap)
        return None
