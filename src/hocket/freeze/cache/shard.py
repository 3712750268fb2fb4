"""One file of entries: slots of one size, and a table that says what is in them.

    header │ record 0 │ record 1 │ ... │ slot 0        │ slot 1        │ ...
    64 B     40 B       40 B             content         content

A content is written before its record, and its checksum is compared whenever it is
read: after a write that was cut off, the slot counts as empty. Contents are read from a
memory map, and written by `pwrite`: to a full disk that is an error, and no signal.

The process that writes a shard holds a lock on it, which the system releases when the
process ends. Other processes read it at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

SUFFIX: Final = ".shard"
_HEADER: Final = struct.Struct("<16sQQ")
_MAGIC: Final = b"hocket cache 1\n\0"
_HEADER_BYTES: Final = 64
_PAGE: Final = 4096


class Shard:
    """An open shard.

    Args:
        path: the file.
        handle: its descriptor, which the shard closes.
        is_own: whether this process writes it.

    Attributes:
        slot_bytes: the most that an entry may have.
        num_slots: entries that it has room for.
        num_bytes: the length of the file.
        keys: the entries' keys by slot, as the table said when it was last read, and
            those that this process has written since.

    Raises:
        ValueError: the file is no whole shard.
    """

    def __init__(self, path: Path, handle: int, *, is_own: bool) -> None:
        self.path = path
        self.is_own = is_own
        self._handle = handle
        header = os.pread(handle, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        magic, slot_bytes, num_slots = _HEADER.unpack(header)
        self.slot_bytes: int = slot_bytes
        self.num_slots: int = num_slots
        self.num_bytes = file_bytes(slot_bytes, num_slots)
        if magic != _MAGIC or os.fstat(handle).st_size != self.num_bytes:
            raise ValueError(path)
        mapped = mmap.mmap(handle, self.num_bytes, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(mapped, np.uint8)  # unmapped with its last reader
        self.keys: dict[int, Key] = {}
        self._table = np.zeros((num_slots, RECORD_BYTES), np.uint8)

    @classmethod
    def create(cls, path: Path, slot_bytes: int, num_slots: int) -> Shard:
        """Make a shard, with all of its bytes reserved on the disk.

        Raises:
            BlockingIOError: another process took the file for one that is left over;
                another name will do.
            OSError: the disk is full, for example; no file is left behind.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _lock_new(handle)
            os.posix_fallocate(handle, 0, file_bytes(slot_bytes, num_slots))
            os.pwrite(handle, _HEADER.pack(_MAGIC, slot_bytes, num_slots), 0)
            return cls(path, handle, is_own=True)
        except BaseException:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path, *, own_within: int) -> Shard | None:
        """Open a shard.

        Args:
            path: the file.
            own_within: write it if it has no more bytes, and no other process does.

        Returns:
            The shard; None if it is gone, or no whole shard. One that is not whole and
            that no process is making is deleted.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        is_own = os.fstat(handle).st_size <= own_within and _lock(handle)
        try:
            return cls(path, handle, is_own=is_own)
        except ValueError:
            if is_own:
                path.unlink(missing_ok=True)
            os.close(handle)
            return None

    def records(self) -> dict[int, Key]:
        """Return the slots that are said to have an entry, with its key.

        Only what has changed since the last call is parsed.
        """
        if not self._is_whole:
            return {}
        end = _HEADER_BYTES + self._table.size
        table = self._bytes[_HEADER_BYTES:end].reshape(self._table.shape).copy()
        for slot in np.flatnonzero((table != self._table).any(axis=1)).tolist():
            *key, _, _ = _RECORD.unpack(table[slot])
            self.keys.pop(slot, None)
            if any(key[0]):
                self.keys[slot] = Key(*key)
        self._table = table
        return self.keys

    def read(self, slot: int, key: Key) -> Content | None:
        """Return a slot's content; None unless it is this key's, whole and unchanged.

        Args:
            slot: where the entry is said to be.
            key: the entry's.
        """
        if not self._is_whole:
            return None
        at = self._record_at(slot)
        record = self._bytes[at : at + RECORD_BYTES].tobytes()
        *found, num_bytes, _ = _RECORD.unpack(record)
        if tuple(found) != key or num_bytes > self.slot_bytes:
            return None
        at = self._content_at(slot)
        content = self._bytes[at : at + num_bytes].copy()
        return content if record_of(key, content) == record else None

    def write(self, slot: int, key: Key, content: Content) -> None:
        """Put an entry into a slot, over what is there.

        Raises:
            OSError: it could not be written.
        """
        _write(self._handle, content.data, self._content_at(slot))
        record = memoryview(record_of(key, content))
        _write(self._handle, record, self._record_at(slot))
        self.keys[slot] = key

    def close(self) -> None:
        """Close it, and let other processes write it."""
        handle, self._handle = self._handle, -1
        if self.is_own:  # a process forked meanwhile has the descriptor, too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)

    def delete(self) -> None:
        """Close it, and delete the file."""
        self.path.unlink(missing_ok=True)
        self.close()

    def take_over(self) -> bool:
        """Become its writer, unless another process is."""
        self.is_own = self.is_own or _lock(self._handle)
        return self.is_own

    @property
    def _is_whole(self) -> bool:
        """Whether the file was not cut off: reading a map behind its end is fatal."""
        with contextlib.suppress(OSError):  # another thread has closed it
            return os.fstat(self._handle).st_size >= self.num_bytes
        return False

    def _record_at(self, slot: int) -> int:
        return _HEADER_BYTES + slot * RECORD_BYTES

    def _content_at(self, slot: int) -> int:
        return _contents_at(self.num_slots) + slot * self.slot_bytes


def file_bytes(slot_bytes: int, num_slots: int) -> int:
    """Return the length of a shard's file."""
    return _contents_at(num_slots) + num_slots * slot_bytes


def slots_within(num_bytes: int, slot_bytes: int) -> int:
    """Return how many slots a file of at most so many bytes has.

    >>> slots_within(file_bytes(4096, 200), 4096)
    200
    >>> slots_within(4095, 1)
    0
    """
    num_slots = num_bytes // slot_bytes
    while num_slots and (over := file_bytes(slot_bytes, num_slots) - num_bytes) > 0:
        num_slots = max(0, num_slots - -(-over // (slot_bytes + RECORD_BYTES)))
    return num_slots


def _contents_at(num_slots: int) -> int:
    table = _HEADER_BYTES + num_slots * RECORD_BYTES
    return -(-table // _PAGE) * _PAGE


def _lock_new(handle: int) -> None:
    """Lock a file that was just made.

    Raises:
        BlockingIOError: another process locked it first, or has deleted it.
    """
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.fstat(handle).st_nlink:
        raise BlockingIOError("another process deleted it")


def _lock(handle: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _write(handle: int, left: memoryview, at: int) -> None:
    while left:
        done = os.pwrite(handle, left, at)
        left, at = left[done:], at + done


# One entry: what the frozen layers compute of one sample, and what it depends on.

Content: TypeAlias = NDArray[np.uint8]  # of one entry, 1-dimensional

_KEY: Final = struct.Struct("<16sIIq")
_RECORD: Final = struct.Struct("<16sIIqII")
RECORD_BYTES: Final = _RECORD.size


class Key(NamedTuple):
    """Everything that an entry depends on: entries of other keys are never used.

    Args:
        prefix: a digest of the frozen layers, their weights and their buffers; 16
            bytes, not all of them 0.
        data: a digest of the data set, and of the draw of its random transforms.
        form: a digest of the shapes and types of the sample's inputs.
        sample: the sample's row in the data set.
    """

    prefix: bytes
    data: int
    form: int
    sample: int


def record_of(key: Key, content: Content) -> bytes:
    """Return what a file says of an entry, in `RECORD_BYTES` bytes.

    It is the key, the content's length, and the CRC-32 of both together.
    """
    checksum = zlib.crc32(content.data, zlib.crc32(_KEY.pack(*key)))
    return _RECORD.pack(*key, len(content), checksum)
