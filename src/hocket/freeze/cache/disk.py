"""The entries on disk: this worker's shards, and those of others in the same folder.

    cache/  cache.json       the model that all entries are of
            3f2a91c0.shard   written by this worker
            77be0d15.shard   written by another one; read here

A shard whose writer has ended belongs to the next worker that opens the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Final

from hocket.errors import ConfigError
from hocket.freeze.cache.next_use import Furthest, NextUse
from hocket.freeze.cache.shard import (
    SUFFIX,
    Content,
    Key,
    Shard,
    file_bytes,
    slots_within,
)

# Of the first shard; each later one is as large as all earlier ones together.
_FIRST_BYTES: Final = 64 << 20
_STEPS_PER_OCTAVE: Final = 8  # of the sizes of slots

_Place = tuple[Shard, int]


class Disk:
    """What one worker keeps in the folder, and finds there.

    Any thread may read; one at a time may do all else.

    Args:
        folder: it exists.
        budget_bytes: the most that this worker's shards take.
        use: when entries are used next.

    Attributes:
        problem: why the shards can no longer grow; empty if they can.
    """

    def __init__(self, folder: Path, budget_bytes: int, use: NextUse) -> None:
        self.problem = ""
        self.use = use
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._shards: dict[Path, Shard] = {}
        self._index: dict[Key, _Place] = {}
        self._held: dict[Shard, dict[int, Key]] = {}  # in this worker's own
        self._free: defaultdict[int, list[_Place]] = defaultdict(list)  # by size
        self._order: defaultdict[int, Furthest] = defaultdict(Furthest)  # by size
        self._prefixes: Collection[bytes] = ()
        self._present = b""

    @property
    def num_bytes(self) -> int:
        """The bytes of this worker's shards."""
        return sum(shard.num_bytes for shard in self._held)

    def __contains__(self, key: Key) -> bool:
        """Whether an entry is said to be there."""
        return key in self._index

    def read(self, key: Key) -> Content | None:
        """Return an entry; None if there is no whole one."""
        place = self._index.get(key)
        if place is None:
            return None
        shard, slot = place
        content = shard.read(slot, key)
        if content is None:
            with self._lock:
                self._forget(key)
        return content

    def write(self, key: Key, content: Content) -> bool:
        """Write an entry, unless the disk is full of entries that are used sooner.

        Only entries of its size give their place to it.

        Returns:
            Whether it is there.
        """
        if key in self._index:
            return True
        with self._lock:
            place = self._place_for(len(content), self.use.of(key))
        if place is None:
            return False
        shard, slot = place
        try:
            shard.write(slot, key, content)
        except OSError as error:
            self._stop(f"could not be written: {error.strerror or error}")
            return False
        with self._lock:
            self._enter(shard, slot, key)
        return True

    def move(self, key: Key) -> None:
        """Rank an entry again, whose next use has changed."""
        with self._lock:
            place = self._index.get(key)
            if place is not None:
                self._order[place[0].slot_bytes].move(key, self.use.of(key))

    def rank(self, use: NextUse) -> None:
        """Begin another order of samples, or another place in it."""
        with self._lock:
            self.use = use
            for held in self._held.values():
                for key in held.values():
                    self.move(key)

    def drop(self, key: Key) -> None:
        """Give the place of an entry to others."""
        with self._lock:
            self._forget(key)

    def keep(self, present: bytes, before: bytes) -> None:
        """Drop all entries but those of two prefixes, and delete files without any.

        Args:
            present: what is stored from now on.
            before: what it is computed from.
        """
        with self._lock:
            self._present, self._prefixes = present, (present, before)
            for key in [x for x in self._index if x.prefix not in self._prefixes]:
                self._forget(key)
            self.refresh()
            for shard in [*self._shards.values()]:
                if not self._kept(shard) and shard.take_over():
                    self._delete(shard)

    def refresh(self) -> None:
        """Look for entries that other workers have written."""
        with self._lock:
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                if path not in self._shards:
                    self._open(path)
            for shard in [*self._shards.values()]:
                if shard in self._held:
                    continue
                if not shard.path.exists():
                    self._delete(shard)
                    continue
                for slot, key in shard.records().items():
                    if key.prefix in self._prefixes:
                        self._index.setdefault(key, (shard, slot))

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._index.clear()
            self._held.clear()
            for shard in self._shards.values():
                shard.close()
            self._shards.clear()

    def _open(self, path: Path) -> None:
        """Open a shard; write it from now on, if it has no writer and fits."""
        shard = Shard.open(path, own=self._fits(path))
        if shard is None:
            return
        self._shards[path] = shard
        if not shard.is_own:
            return
        self._held[shard] = {}
        known = shard.records()
        for slot in range(shard.num_slots):
            key = known.get(slot)
            if key is None or key.prefix not in self._prefixes or key in self._index:
                self._free[shard.slot_bytes].append((shard, slot))
            else:
                self._enter(shard, slot, key)

    def _fits(self, path: Path) -> bool:
        try:
            return self.num_bytes + path.stat().st_size <= self._budget_bytes
        except OSError:  # it is gone
            return False

    def _kept(self, shard: Shard) -> bool:
        if shard in self._held:
            return bool(self._held[shard])
        return any(key.prefix in self._prefixes for key in shard.records().values())

    def _enter(self, shard: Shard, slot: int, key: Key) -> None:
        self._index[key] = shard, slot
        self._held[shard][slot] = key
        self._order[shard.slot_bytes].set(key, self.use.of(key))

    def _forget(self, key: Key) -> None:
        place = self._index.pop(key, None)
        if place is None or place[0] not in self._held:
            return
        shard, slot = place
        del self._held[shard][slot]
        self._order[shard.slot_bytes].remove(key)
        self._free[shard.slot_bytes].append(place)

    def _place_for(self, num_bytes: int, time: int) -> _Place | None:
        """Return a free place; if there is none, that of the entry used last of all."""
        size = slot_size(num_bytes)
        free = self._free[size]
        while not free and self._make_room(size):
            pass
        if not free:
            last = self._order[size].last()
            if last is None or last[0] <= time:
                return None
            self._forget(last[1])
        return free.pop()

    def _make_room(self, size: int) -> bool:
        """Make a shard, or delete one of an earlier prefix; return whether it did."""
        if self.problem:
            return False
        room = self._budget_bytes - self.num_bytes
        most = min(room, max(self.num_bytes, _FIRST_BYTES, file_bytes(size, 1)))
        num_slots = slots_within(most, size)
        if num_slots:
            return self._create(size, num_slots)
        others = [
            (len(held), shard.path, shard)
            for shard, held in self._held.items()
            if shard.slot_bytes != size
            and all(key.prefix != self._present for key in held.values())
        ]
        if others:
            self._delete(min(others)[2])
        return bool(others)

    def _create(self, size: int, num_slots: int) -> bool:
        path = self._folder / f"{secrets.token_hex(8)}{SUFFIX}"
        try:
            shard = Shard.create(path, size, num_slots)
        except BlockingIOError:
            return True  # and try again, under another name
        except OSError as error:
            self._stop(f"cannot grow: {error.strerror or error}")
            return False
        self._shards[path] = shard
        self._held[shard] = {}
        self._free[size] += [(shard, slot) for slot in reversed(range(num_slots))]
        return True

    def _stop(self, why: str) -> None:
        self._budget_bytes = self.num_bytes
        self.problem = f"the cache in {self._folder} {why}"

    def _delete(self, shard: Shard) -> None:
        """Delete a shard that no other process writes; close any other."""
        del self._shards[shard.path]
        for key in [x for x, place in self._index.items() if place[0] is shard]:
            self._forget(key)
        self._held.pop(shard, None)
        size = shard.slot_bytes
        self._free[size] = [x for x in self._free[size] if x[0] is not shard]
        if shard.is_own:
            shard.delete()
        else:
            shard.close()


def slot_size(num_bytes: int) -> int:
    """Return the size of the slots that an entry goes to: at most an eighth larger.

    Entries of similar sizes share shards.

    >>> [slot_size(x) for x in (1, 64, 1000, 1024, 1025)]
    [64, 64, 1024, 1024, 1152]
    """
    step = max(64, (1 << (num_bytes - 1).bit_length()) // 2 // _STEPS_PER_OCTAVE)
    return max(1, -(-num_bytes // step)) * step


# The folder of a cache, which holds the outputs of one model.

ABOUT: Final = "cache.json"
_VERSION: Final = 1


def claim_folder(folder: Path, model: str) -> None:
    """Make a folder for a model's outputs, or check that it is one. Any worker may.

    Args:
        folder: the user's.
        model: a digest of the names and shapes of the model's weights.

    Raises:
        ConfigError: it cannot be made, has other files, or is of another model.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = _content(folder)
        if known is None:
            _refuse_other_files(folder)
            _write(folder, {"version": _VERSION, "model": model})
    except OSError as error:
        if error.errno == errno.ENOSPC:  # the cache then says so, when it writes
            return
        raise ConfigError(
            f"the cache's folder {folder} cannot be used "
            f"({error.strerror or error}): give one that can be written"
        ) from error
    if known is not None and known != {"version": _VERSION, "model": model}:
        raise ConfigError(
            f"{folder} is the cache of another model (digest {known.get('model')}, "
            f"version {known.get('version')}; this one has {model}, version "
            f"{_VERSION}): give each model a folder of its own, or delete that one"
        )


def _content(folder: Path) -> dict[str, object] | None:
    """Return what the folder says it is of; None if that is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads((folder / ABOUT).read_bytes())
        if isinstance(content, dict):
            return content
    return None


def _refuse_other_files(folder: Path) -> None:
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix != SUFFIX
        and not path.name.startswith(".")
        and path.name != ABOUT
    )
    if others:
        raise ConfigError(
            f"{folder} is no cache: it has {others[0]} and {len(others) - 1} more "
            "files; give an empty folder, or one that does not exist"
        )


def _write(folder: Path, content: dict[str, object]) -> None:
    path = folder / f".{secrets.token_hex(4)}"
    try:
        path.write_text(json.dumps(content))
        os.replace(path, folder / ABOUT)
    finally:
        path.unlink(missing_ok=True)
