"""Memory and disk together, with the thread between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.errors import ConfigError
from hocket.freeze.cache import payoff
from hocket.freeze.cache.payoff import CacheCosts, CacheMode, Payoff
from hocket.freeze.cache.shard import Content, Key
from hocket.freeze.cache.store import Store
from hocket.freeze.settings import Cache
from tests.freeze.cache.test_disk import (
    NEW,
    NUM_SAMPLES,
    OLD,
    SIZE,
    content_of,
    in_order,
    key_of,
    shards_of,
)


def open_store(folder: Path, ram_bytes: int, disk_bytes: int) -> Store:
    """A store whose samples are used in the order of their rows."""
    store = Store(Cache(folder, ram_bytes=ram_bytes, disk_bytes=disk_bytes), in_order())
    store.keep(NEW, OLD)
    return store


def put_all(store: Store) -> None:
    """Put an entry of each sample, and wait."""
    keys = [key_of(sample) for sample in range(NUM_SAMPLES)]
    store.put(keys, lambda: [*map(content_of, keys)], SIZE * len(keys))
    store.flush()


def found(store: Store) -> list[int]:
    """The samples that are there; their contents are right."""
    contents = {x: store.get(key_of(x)) for x in range(NUM_SAMPLES)}
    for sample, content in contents.items():
        if content is not None:
            np.testing.assert_array_equal(content, content_of(key_of(sample)))
    return [sample for sample, content in contents.items() if content is not None]


def test_memory_alone_keeps_what_fits(tmp_path: Path) -> None:
    """No file is written without a budget for it."""
    store = open_store(tmp_path, 3 * SIZE, 0)
    put_all(store)
    assert found(store) == [0, 1, 2]
    store.close()
    assert not [*tmp_path.iterdir()]


def test_disk_stands_behind_the_memory(tmp_path: Path) -> None:
    """All is written, and found by the next store."""
    store = open_store(tmp_path, 3 * SIZE, 1 << 20)
    put_all(store)
    store.close()
    store = open_store(tmp_path, 3 * SIZE, 1 << 20)
    assert found(store) == [*range(NUM_SAMPLES)]
    store.close()


def test_a_closed_store_begins_empty(tmp_path: Path) -> None:
    """Others may write its files until then; it finds them when it is used again."""
    store = open_store(tmp_path, 3 * SIZE, 1 << 20)
    put_all(store)
    store.close()
    assert found(store) == []
    other = open_store(tmp_path, 0, 1 << 20)
    other.used([], [key_of(3)])
    put_all(other)
    assert found(other) == [*range(NUM_SAMPLES)]
    assert len(shards_of(tmp_path)) == 1
    other.close()
    store.keep(NEW, OLD)
    assert found(store) == [*range(NUM_SAMPLES)]
    store.close()


def test_memory_takes_what_is_read_and_used_next(tmp_path: Path) -> None:
    """What is read from the disk is found though the files are gone, if it is next."""
    store = open_store(tmp_path, 0, 1 << 20)
    put_all(store)
    store.close()
    store = open_store(tmp_path, 3 * SIZE, 1 << 20)
    assert found(store) == [*range(NUM_SAMPLES)]
    shards_of(tmp_path)[0].write_bytes(b"")
    assert found(store) == [0, 1, 2]
    store.close()


def test_what_is_over_is_dropped(tmp_path: Path) -> None:
    """From memory and disk."""
    store = open_store(tmp_path, 3 * SIZE, 1 << 20)
    put_all(store)
    store.used([], [key_of(0), key_of(6)])
    assert found(store) == [1, 2, 3, 4, 5, 7]
    store.keep(OLD, b"")
    assert found(store) == []
    store.close()
    assert not shards_of(tmp_path)


def test_errors_of_the_thread_come_out(tmp_path: Path) -> None:
    """Where it is waited for, and again at the next call."""
    store = open_store(tmp_path, SIZE, 0)

    def fails() -> list[Content]:
        raise ZeroDivisionError

    store.put([key_of(0)], fails, SIZE)
    with pytest.raises(ZeroDivisionError):
        store.flush()
    with pytest.raises(ZeroDivisionError):
        store.put([key_of(0)], fails, SIZE)
    store.close()


@pytest.mark.parametrize(
    ("boundary", "num_frozen", "expected"),
    [
        (0, 3, 6.0 + 0.5),  # all layers, then stored
        (3, 3, 1.0),  # read
        (2, 3, 1.0 + 3.0 + 0.5),  # read, the layer behind, stored
        (3, 2, 3.0 + 0.5),  # what is kept lies behind layers that train again
        (4, 4, 1.0),
        (1, 1, 1.0),
    ],
)
def test_seconds_of_frozen_layers_in_the_next_epoch(
    boundary: int, num_frozen: int, expected: float
) -> None:
    """Layers of 1, 2, 3 and 4 s; reading takes 1 s, storing a half.

    Reading that takes longer than computing is not waited for.
    """
    costs = CacheCosts(boundary, 1.0, 0.5)
    assert costs.prefix_s([1.0, 2.0, 3.0, 4.0][:num_frozen]) == expected
    assert CacheCosts(boundary, 9.0).prefix_s([1.0, 2.0]) == 3.0


def test_reading_is_chosen_where_it_is_faster() -> None:
    """By the medians of three; and given up by the latest sixteen."""
    slow, fast = Payoff(), Payoff()
    for number, read_s in enumerate((1.0, 3.0, 3.0)):
        assert slow.add_trial(2.0, read_s) == (number == 2)
    assert slow.mode is CacheMode.COMPUTES
    for number, read_s in enumerate((9.0, 1.0, 1.0)):
        assert fast.add_trial(2.0, read_s) == (number == 2)
    assert fast.mode.value == "reads"
    gave_up = [fast.add_read(3.0) for _ in range(payoff._NUM_LATEST)]
    assert gave_up.index(True) == payoff._NUM_LATEST - 4  # of sixteen, nine are slow
    assert fast.mode is CacheMode.COMPUTES


@pytest.mark.parametrize(
    ("numbers", "dtype", "match"),
    [
        ((-1, 5), None, "ram_bytes is -1"),
        ((5, -1), None, "disk_bytes is -1"),
        ((0, 0), None, "both 0"),
        ((1, 1), "float16", "dtype is 'float16'"),
    ],
)
def test_settings_are_checked(
    numbers: tuple[int, int], dtype: str | None, match: str
) -> None:
    """When they are made."""
    with pytest.raises(ConfigError, match=match):
        Cache("cache", ram_bytes=numbers[0], disk_bytes=numbers[1], dtype=dtype)


def test_keys_of_other_data_differ() -> None:
    """A sample of another data set is another entry."""
    assert Key(NEW, 1, 0, 3) != key_of(3)
