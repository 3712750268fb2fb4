"""The cache keeps what Belady's algorithm keeps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hocket.freeze.cache.next_use import NEVER, NextUse
from hocket.freeze.cache.shard import Key
from hocket.freeze.cache.store import Memory

PREFIX = b"p" * 16
CONTENT = np.zeros(8, np.uint8)


def key_of(sample: int, data: int = 0) -> Key:
    """An entry of a sample."""
    return Key(PREFIX, data, 0, sample)


def order_of(epoch: int, num_samples: int = 12) -> NDArray[np.int64]:
    """A permutation of each epoch's own."""
    return np.random.default_rng(epoch).permutation(num_samples)


@given(capacity=st.integers(0, 12), first=st.integers(0, 50))
def test_has_as_many_hits_as_possible(capacity: int, first: int) -> None:
    """In three epochs of 12 samples, each in an order of its own."""
    use = NextUse(0, 12, 12, lambda epoch: order_of(epoch + first))
    uses = [int(x) for epoch in range(3) for x in order_of(epoch + first)]
    later = [int(x) for epoch in (3, 4) for x in order_of(epoch + first)]
    memory = Memory(capacity * len(CONTENT), use)
    hits = 0
    for time, sample in enumerate(uses):
        use.now = time
        hits += memory.get(key_of(sample)) is not None
        use.now = time + 1
        memory.move(key_of(sample))
        memory.put(key_of(sample), CONTENT)
    assert memory.num_bytes == capacity * len(CONTENT)
    assert hits == hits_of_belady(uses, later, capacity)


def hits_of_belady(uses: list[int], later: list[int], capacity: int) -> int:
    """The hits within the first uses, of the algorithm that knows the later ones."""
    kept: set[int] = set()
    hits = 0
    for now, sample in enumerate(uses):
        hits += sample in kept
        kept.add(sample)
        if len(kept) > capacity:
            ahead = uses[now + 1 :] + later
            kept.remove(max(kept, key=ahead.index))
    return hits


def test_samples_that_an_epoch_leaves_out() -> None:
    """With drop_last, those at an epoch's end are used in a later one, or never."""
    use = NextUse(0, 12, 8, order_of)
    for sample in range(12):
        times = [
            8 * epoch + list(order_of(epoch)).index(sample)
            for epoch in range(3)
            if list(order_of(epoch)).index(sample) < 8
        ]
        use.now = 3
        assert use.of(key_of(sample)) == min(
            [x for x in times if x >= 3], default=NEVER
        )
    fixed = NextUse(0, 12, 8, lambda _: np.arange(12))
    assert fixed.of(key_of(9)) == NEVER
    assert fixed.of(key_of(2, data=1)) == NEVER
