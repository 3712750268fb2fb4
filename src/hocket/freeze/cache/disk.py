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
import secrets
from collections import defaultdict
from pathlib import Path
from typing import Final

from hocket.errors import ConfigError
from hocket.freeze.cache.next_use import NextUse, Tier
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


class Disk(Tier[_Place]):
    """What one worker keeps in the folder, and finds there.

    Args:
        folder: it exists.
        budget_bytes: the most that this worker's shards take.
        use: when entries are used next.

    Attributes:
        problem: why the shards can no longer grow; empty if they can.
    """

    def __init__(self, folder: Path, budget_bytes: int, use: NextUse) -> None:
        super().__init__(use)
        self.problem = ""
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._shards: dict[Path, Shard] = {}
        self._empty: defaultdict[int, list[_Place]] = defaultdict(list)  # by size
        self._prefixes: tuple[bytes, ...] = ()  # the present one, and one before

    @property
    def num_bytes(self) -> int:
        """The bytes of this worker's shards."""
        return sum(shard.num_bytes for shard in self._shards.values() if shard.is_own)

    def read(self, key: Key) -> Content | None:
        """Return an entry; None if there is no whole one."""
        place = self._entries.get(key)
        if place is None:
            return None
        shard, slot = place
        content = shard.read(slot, key)
        if content is None:
            self.drop(key)
        return content

    def write(self, key: Key, content: Content) -> bool:
        """Write an entry, unless the disk is full of entries that are used sooner.

        Only entries of its size give their place to it.

        Returns:
            Whether it is there.
        """
        if key in self:
            return True
        with self._lock:
            place = self._place_for(slot_size(len(content)), self.use.of(key))
        if place is None:
            return False
        shard, slot = place
        try:
            shard.write(slot, key, content)
        except OSError as error:
            self._stop("could not be written", error)
            return False
        with self._lock:
            self._enter(key, place)
        return True

    def keep(self, present: bytes, before: bytes) -> None:
        """Drop all entries but those of two prefixes, and delete files without any."""
        with self._lock:
            super().keep(present, before)
            self._prefixes = present, before
            self.refresh()
            used = {shard for shard, _ in self._entries.values()}
            for shard in [*self._shards.values()]:
                if shard not in used and shard.take_over():
                    self._delete(shard)

    def refresh(self) -> None:
        """Look for entries that other workers have written."""
        with self._lock:
            paths = {*self._folder.glob(f"*{SUFFIX}")}
            for path in sorted(paths - self._shards.keys()):
                room = self._budget_bytes - self.num_bytes
                shard = Shard.open(path, own_within=room)
                if shard is not None:
                    self._add(shard)
            for shard in [x for x in self._shards.values() if not x.is_own]:
                if shard.path.exists():
                    self._find(shard)
                else:
                    self._delete(shard)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._entries.clear()
            for shard in self._shards.values():
                shard.close()
            self._shards.clear()

    def _add(self, shard: Shard) -> None:
        """Take the entries of a shard, and the other slots of one's own."""
        self._shards[shard.path] = shard
        self._find(shard)
        if shard.is_own:
            taken = {*self._entries.values()}
            slots = ((shard, slot) for slot in reversed(range(shard.num_slots)))
            self._empty[shard.slot_bytes] += [x for x in slots if x not in taken]

    def _find(self, shard: Shard) -> None:
        """Take the entries of a shard that are not found elsewhere."""
        for slot, key in shard.records().items():
            if key.prefix in self._prefixes and key not in self:
                self._enter(key, (shard, slot))

    def _enter(self, key: Key, place: _Place) -> None:
        self._entries[key] = place
        if place[0].is_own:
            self._rank(key, place[0].slot_bytes)

    def _free(self, entry: _Place) -> None:
        shard, slot = entry
        if shard.is_own:
            shard.keys.pop(slot, None)
            self._empty[shard.slot_bytes].append(entry)

    def _place_for(self, size: int, time: int) -> _Place | None:
        """Return a free place; if there is none, that of the entry used last of all."""
        free = self._empty[size]
        while not free:
            if not self._make_room(size) and not self._drops_later(time, size):
                return None
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
            shard
            for shard in self._shards.values()
            if shard.is_own
            and shard.slot_bytes != size
            and all(key.prefix != self._prefixes[0] for key in shard.keys.values())
        ]
        if others:
            self._delete(min(others, key=lambda shard: len(shard.keys)))
        return bool(others)

    def _create(self, size: int, num_slots: int) -> bool:
        path = self._folder / f"{secrets.token_hex(8)}{SUFFIX}"
        try:
            self._add(Shard.create(path, size, num_slots))
        except BlockingIOError:
            pass  # and try again, under another name
        except OSError as error:
            self._stop("cannot grow", error)
            return False
        return True

    def _stop(self, why: str, error: OSError) -> None:
        self.problem = f"the cache in {self._folder} {why}: {error.strerror or error}"

    def _delete(self, shard: Shard) -> None:
        """Delete a shard that no other process writes; close any other."""
        del self._shards[shard.path]
        for key in [x for x, place in self._entries.items() if place[0] is shard]:
            self.drop(key)
        size = shard.slot_bytes
        self._empty[size] = [x for x in self._empty[size] if x[0] is not shard]
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
    about: dict[str, object] = {"version": _VERSION, "model": model}
    known: dict[str, object] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, TypeError, ValueError):
            known = dict(json.loads((folder / ABOUT).read_bytes()))
        if not known:  # it is missing or damaged
            _refuse_other_files(folder)
            _write(folder, json.dumps(about))
    except OSError as error:
        if error.errno == errno.ENOSPC:  # the cache then says so, when it writes
            return
        raise ConfigError(
            f"the cache's folder {folder} cannot be used "
            f"({error.strerror or error}): give one that can be written"
        ) from error
    if known not in ({}, about):
        raise ConfigError(
            f"{folder} is the cache of another model (digest {known.get('model')}, "
            f"version {known.get('version')}; this one has {model}, version "
            f"{_VERSION}): give each model a folder of its own, or delete that one"
        )


def _refuse_other_files(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.suffix != SUFFIX)
    others = [x for x in names if x != ABOUT and not x.startswith(".")]
    if others:
        raise ConfigError(
            f"{folder} is no cache: it has {others[0]} and {len(others) - 1} more "
            "files; give an empty folder, or one that does not exist"
        )


def _write(folder: Path, about: str) -> None:
    path = folder / f".{secrets.token_hex(4)}"
    try:
        path.write_text(about)
        path.replace(folder / ABOUT)
    finally:
        path.unlink(missing_ok=True)
