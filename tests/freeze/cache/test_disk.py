"""Entries on disk are whole, of the key that was asked for, or not there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hocket.errors import ConfigError
from hocket.freeze.cache.disk import ABOUT, Disk, claim_folder
from hocket.freeze.cache.next_use import NextUse
from hocket.freeze.cache.shard import RECORD_BYTES, SUFFIX, Content, Key, file_bytes

OLD, NEW = b"o" * 16, b"n" * 16
NUM_SAMPLES = 8
SIZE = 4096
WRITES_FOR_EVER = """
import sys
from pathlib import Path
from itertools import count
from tests.freeze.cache.test_disk import content_of, key_of, open_disk
disk = open_disk(Path(sys.argv[1]))
for i in count():
    new, old = (bytes([(i // 8 - back) % 8 + 1]) * 16 for back in (0, 1))
    key = key_of(i % 8, new)
    disk.keep(new, old)
    disk.drop(key_of(i % 8, old))
    disk.write(key, content_of(key))
    print(i, flush=True)
"""


def key_of(sample: int, prefix: bytes = NEW) -> Key:
    """An entry of a sample."""
    return Key(prefix, 0, 0, sample)


def content_of(key: Key, size: int = SIZE) -> Content:
    """Bytes that differ between keys."""
    drawn = np.random.default_rng([*key.prefix, key.sample])
    return drawn.integers(256, size=size, dtype=np.uint8)


def in_order() -> NextUse:
    """Samples are used in the order of their rows."""
    return NextUse(0, NUM_SAMPLES, NUM_SAMPLES, lambda _: np.arange(NUM_SAMPLES))


def open_disk(folder: Path, num_entries: int = NUM_SAMPLES, size: int = SIZE) -> Disk:
    """A folder with room for so many entries."""
    return Disk(folder, file_bytes(size, num_entries), in_order())


def filled(folder: Path) -> Disk:
    """A folder with an entry of each sample."""
    disk = open_disk(folder)
    disk.keep(NEW, OLD)
    for sample in range(NUM_SAMPLES):
        assert disk.write(key_of(sample), content_of(key_of(sample)))
    return disk


def read(disk: Disk, prefix: bytes = NEW) -> list[int]:
    """The samples whose entries are read; their contents are right."""
    found = []
    for sample in range(NUM_SAMPLES):
        key = key_of(sample, prefix)
        content = disk.read(key)
        if content is not None:
            np.testing.assert_array_equal(content, content_of(key))
            found.append(sample)
    return found


def copied(folder: Path, name: str) -> Path:
    """A copy of a folder, since entries of other prefixes are dropped."""
    new = folder / name
    new.mkdir()
    for path in shards_of(folder):
        (new / path.name).write_bytes(path.read_bytes())
    return new


def shards_of(folder: Path) -> list[Path]:
    """The files of entries."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_entries_are_found_again(tmp_path: Path) -> None:
    """By the next process, which writes the same file from then on."""
    filled(tmp_path).close()
    disk = open_disk(tmp_path)
    disk.keep(NEW, OLD)
    assert read(disk) == [*range(NUM_SAMPLES)]
    assert disk.num_bytes == file_bytes(SIZE, NUM_SAMPLES)


def test_other_workers_read_what_one_writes(tmp_path: Path) -> None:
    """While it is open, also entries that come later; each writes files of its own."""
    first = open_disk(tmp_path)
    first.keep(NEW, OLD)
    second = open_disk(tmp_path)
    second.keep(NEW, OLD)
    for sample in range(3):
        first.write(key_of(sample), content_of(key_of(sample)))
    second.write(key_of(5), content_of(key_of(5)))
    assert read(second) == [5]
    second.refresh()
    first.refresh()
    assert read(first) == read(second) == [0, 1, 2, 5]
    first.drop(key_of(1))
    first.write(key_of(7), content_of(key_of(7)))  # into the same slot
    assert read(second) == [0, 2, 5]
    assert len(shards_of(tmp_path)) == 2


@pytest.mark.parametrize(
    "where", ["header", "record", "key", "content", "cut", "empty"]
)
def test_damage_is_noticed(tmp_path: Path, where: str) -> None:
    """An entry whose bytes have changed is not used; nor is a file without its end."""
    filled(tmp_path).close()
    [path] = shards_of(tmp_path)
    text = bytearray(path.read_bytes())
    places = {"header": 3, "record": 64 + 34, "key": 64 + 24, "content": 4096 + 5}
    if where in places:
        text[places[where]] ^= 1
    path.write_bytes(text[: {"cut": len(text) - 1, "empty": 0}.get(where, len(text))])
    disk = open_disk(tmp_path)
    disk.keep(NEW, OLD)
    num_lost = {"record": 1, "content": 1, "key": 2}.get(where, NUM_SAMPLES)
    assert read(disk) == [*range(num_lost, NUM_SAMPLES)]
    for sample in range(NUM_SAMPLES):
        disk.write(key_of(sample), content_of(key_of(sample)))
    assert read(disk) == [*range(NUM_SAMPLES)]


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path: Path) -> None:
    """Reading the memory map behind its end would end the process."""
    disk = filled(tmp_path)
    os.truncate(shards_of(tmp_path)[0], 5000)
    assert read(disk) == []


def test_a_process_killed_while_it_writes(tmp_path: Path) -> None:
    """All that is found afterwards is whole; killed four times, at any moment."""
    for number in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        for _ in range(60 + 7 * number):
            assert writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        found = 0
        for first in range(1, 9):  # no more than eight entries of each
            prefix = bytes([first]) * 16
            disk = open_disk(copied(tmp_path, f"{number} {first}"))
            disk.keep(prefix, b"")
            found += len(read(disk, prefix))
            disk.close()
        assert NUM_SAMPLES - 2 <= found <= NUM_SAMPLES


def test_the_furthest_gives_way(tmp_path: Path) -> None:
    """Room for three: at the end of the first epoch, what the next one uses first."""
    disk = open_disk(tmp_path, 3)
    disk.keep(NEW, OLD)
    for sample in range(NUM_SAMPLES):
        disk.use.now = sample + 1
        disk.write(key_of(sample), content_of(key_of(sample)))
    assert read(disk) == [0, 1, 2]
    assert disk.num_bytes <= file_bytes(SIZE, 3)


def test_the_old_prefix_gives_way(tmp_path: Path) -> None:
    """Entries in place of others, one by one; another size in place of whole files."""
    disk = open_disk(tmp_path)
    disk.keep(OLD, b"")
    for sample in range(NUM_SAMPLES):
        disk.write(key_of(sample, OLD), content_of(key_of(sample, OLD)))
    disk.keep(NEW, OLD)
    for sample in range(4):
        disk.drop(key_of(sample, OLD))
        assert disk.write(key_of(sample), content_of(key_of(sample)))
    assert read(disk) == [0, 1, 2, 3]
    assert read(disk, OLD) == [4, 5, 6, 7]
    disk.keep(b"m" * 16, NEW)
    assert read(disk, OLD) == []
    small = Key(b"m" * 16, 0, 0, 1)
    assert disk.write(small, content_of(small, 100))
    assert read(disk) == []
    disk.keep(b"l" * 16, b"")
    assert not shards_of(tmp_path)


def test_no_more_bytes_than_allowed(tmp_path: Path) -> None:
    """Of many sizes."""
    budget = file_bytes(SIZE, NUM_SAMPLES)
    disk = Disk(tmp_path, budget, in_order())
    disk.keep(NEW, OLD)
    for number, size in enumerate((10, 5000, 300, 70000, 4096, 20000)):
        disk.write(key_of(number), content_of(key_of(number), size))
        assert sum(x.stat().st_size for x in shards_of(tmp_path)) <= budget


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is stays; the reason is kept, and entries replace each other."""
    disk = open_disk(tmp_path, 2)
    disk.keep(NEW, OLD)
    disk.write(key_of(0), content_of(key_of(0)))
    disk.write(key_of(1), content_of(key_of(1)))
    disk._budget_bytes *= 10

    def is_full(handle: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    disk.use.now = 1
    disk.move(key_of(0))
    assert disk.write(key_of(2), content_of(key_of(2)))
    assert read(disk) == [1, 2]
    assert "cannot grow: No space left on device" in disk.problem
    assert len(shards_of(tmp_path)) == 1


def test_a_folder_is_of_one_model(tmp_path: Path) -> None:
    """Others are refused, as are folders with something else in them."""
    claim_folder(tmp_path / "cache", "abc")
    claim_folder(tmp_path / "cache", "abc")
    with pytest.raises(ConfigError, match=r"of another model \(digest abc"):
        claim_folder(tmp_path / "cache", "def")
    (tmp_path / "cache" / ABOUT).write_text("{")
    claim_folder(tmp_path / "cache", "abc")
    with pytest.raises(ConfigError, match="is no cache: it has cache and 0 more"):
        claim_folder(tmp_path, "abc")
    with pytest.raises(ConfigError, match="cannot be used"):
        claim_folder(tmp_path / "cache" / ABOUT, "abc")


def test_what_a_record_takes() -> None:
    """The table of a shard is as long as `file_bytes` says."""
    assert RECORD_BYTES == 40
    assert file_bytes(4096, 8) == 4096 + 8 * 4096


def test_an_entry_may_be_larger_than_a_first_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past bug: nothing was written, whatever the budget, and nothing was said."""
    monkeypatch.setattr("hocket.freeze.cache.disk._FIRST_BYTES", SIZE // 2)
    disk = open_disk(tmp_path, num_entries=4 * NUM_SAMPLES)
    disk.keep(NEW, OLD)
    for sample in range(NUM_SAMPLES):
        assert disk.write(key_of(sample), content_of(key_of(sample)))
    assert read(disk) == [*range(NUM_SAMPLES)]


def test_ranks_change_while_entries_are_written(tmp_path: Path) -> None:
    """Past bug: two threads changed one order, and the writing one ended."""
    disk = open_disk(tmp_path, num_entries=3)
    disk.keep(NEW, OLD)
    errors: list[BaseException] = []
    ends = threading.Event()

    def rank() -> None:
        try:
            while not ends.is_set():
                for sample in range(NUM_SAMPLES):
                    disk.move(key_of(sample))
        except BaseException as error:
            errors.append(error)

    ranking = threading.Thread(target=rank)
    ranking.start()
    try:
        for i in range(2000):
            key = key_of(i % NUM_SAMPLES)
            disk.write(key, content_of(key))
            disk.drop(key_of((i + 5) % NUM_SAMPLES))
    finally:
        ends.set()
        ranking.join(20.0)
    assert not errors
    assert read(disk)
