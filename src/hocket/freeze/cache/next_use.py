"""When each sample is used next, which decides what the cache keeps.

    order    7 2 5 0 │ 8 3 6 1 ...     known in advance: it follows from seed and epoch
                 ▲ now                 next uses: 5 at once, 0 then; 7 and 2 last

Source: Belady, "A study of replacement algorithms for a virtual-storage computer"
(IBM Systems Journal 5, 1966): the entry that is used last of all leaves first.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hocket.freeze.cache.shard import Key

T = TypeVar("T")
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


class Tier(ABC, Generic[T]):
    """Entries in memory or on disk; of each size, the one that is used last is known.

    Any thread may look for an entry; one at a time may do all else, but for `move`.

    Args:
        use: when entries are used next.

    Attributes:
        use: the same.
    """

    def __init__(self, use: NextUse) -> None:
        self.use = use
        self._lock = threading.RLock()
        self._entries: dict[Key, T] = {}
        self._ranks: dict[Key, tuple[int, int]] = {}  # next use and size, if it may go
        # By size, of negative times; some are outdated.
        self._heaps: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)

    def __contains__(self, key: Key) -> bool:
        """Whether an entry is said to be there."""
        return key in self._entries

    def drop(self, key: Key) -> None:
        """Drop an entry, if it is there; give its place to others."""
        with self._lock:
            self._ranks.pop(key, None)
            if key in self:
                self._free(self._entries.pop(key))

    def move(self, key: Key) -> None:
        """Rank an entry again, whose next use has changed."""
        with self._lock:
            if key in self._ranks:
                self._rank(key, self._ranks[key][1])

    def begin(self, use: NextUse) -> None:
        """Begin another order of samples, or another place in it."""
        with self._lock:
            self.use = use
            for key in self._entries:
                self.move(key)

    def keep(self, present: bytes, before: bytes) -> None:
        """Drop all entries but those of two prefixes.

        Args:
            present: what is stored from now on.
            before: what it is computed from.
        """
        with self._lock:
            for key in [x for x in self._entries if x.prefix not in (present, before)]:
                self.drop(key)

    @abstractmethod
    def _free(self, entry: T) -> None:
        """Give the place of an entry to others."""

    def _rank(self, key: Key, size: int = 0) -> None:
        time, heap = self.use.of(key), self._heaps[size]
        self._ranks[key] = time, size
        heappush(heap, (-time, key))
        if len(heap) > 2 * len(self._ranks) + 64:
            heap[:] = [(-t, k) for k, (t, own) in self._ranks.items() if own == size]
            heapify(heap)

    def _drops_later(self, time: int, size: int = 0) -> bool:
        """Drop the entry of a size that is used last; return whether there was one.

        Args:
            time: entries that are used until then stay.
            size: the entry's.
        """
        heap = self._heaps[size]
        while heap and self._ranks.get(heap[0][1]) != (-heap[0][0], size):
            heappop(heap)
        if not heap or -heap[0][0] <= time:
            return False
        self.drop(heap[0][1])
        return True
