"""A worker's last ops, kept in a file that outlives the process.

The ring is a small memory-mapped file of fixed slots, one per op. Writing into it costs
a fraction of a microsecond and no system call. A worker that is killed leaves the file
behind, and the launcher reads from it what the worker was doing.

    header │ slot 0 │ slot 1 │ ... │ slot 127      op number n is in slot n mod 128
                         ▲
              begin: all of the slot; wait, end: its second half

A reader of a live ring may see a slot half written; it then shows one odd line.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import Final, TypeAlias

NUM_SLOTS: Final = 128
STARTING: Final = -1  # the step of what happens before the first op
NO_RANK: Final = -1  # in place of a rank: the op waits for none

# Called before a wait that may take long, with the channel's name and the rank.
OnWait: TypeAlias = Callable[[str, int], None]


class OpState(IntEnum):
    """The progress of an op."""

    BEGUN = 1
    WAITING = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One op in the recorder's ring.

    Args:
        step: the step in which it ran; `STARTING` before the first.
        op: its text, like `0F3`.
        state: its progress.
        begun_s: when it began, on its host's monotonic clock.
        changed_s: when it came to its present state.
        waits_for: the value that it last waited for; empty if it never waited.
        from_rank: the rank it waited for; `NO_RANK` if it never waited.
    """

    step: int
    op: str
    state: OpState
    begun_s: float
    changed_s: float
    waits_for: str
    from_rank: int


@dataclass(frozen=True, slots=True)
class RecorderSnapshot:
    """The content of a recorder's file, as another process reads it.

    Args:
        pid: the process that writes it.
        entries: the ops, oldest first.
    """

    pid: int
    entries: tuple[RecordedOp, ...]


#                         number, step, begun, op │ changed, state, from_rank, waits_for
_SLOT: Final = struct.Struct("<qqd 27s              d B i 24s".replace(" ", ""))
_TAIL: Final = struct.Struct("<dBi24s")
_END: Final = struct.Struct("<dB")
_TAIL_AT: Final = _SLOT.size - _TAIL.size
_HEADER: Final = struct.Struct("<8sq")
_MAGIC: Final = b"hkring01"
_SIZE: Final = _HEADER.size + NUM_SLOTS * _SLOT.size
_STATES: Final = frozenset(OpState)


class FlightRecorder:
    """Records what a worker is doing. Only one thread may write.

    Args:
        buffer: memory from `FlightRecorder.create`; by default memory that no other
            process sees.
        pid: the process that writes.
    """

    __slots__ = ("_at", "_buffer", "_number")

    def __init__(self, buffer: mmap.mmap | None = None, pid: int = 0) -> None:
        self._buffer = mmap.mmap(-1, _SIZE) if buffer is None else buffer
        self._buffer[:] = bytes(_SIZE)
        self._number = 0
        self._at = _HEADER.size
        _HEADER.pack_into(self._buffer, 0, _MAGIC, pid)

    @classmethod
    def create(cls, path: Path, pid: int) -> FlightRecorder:
        """Make a recorder in a file, and empty it if it exists."""
        with path.open("a+b") as file:
            file.truncate(_SIZE)
            return cls(mmap.mmap(file.fileno(), _SIZE), pid)

    def begin(self, op: str, step: int) -> int:
        """Record that an op begins; return its slot, for `end`."""
        self._number = number = self._number + 1
        self._at = at = _HEADER.size + number % NUM_SLOTS * _SLOT.size
        now = monotonic()
        _SLOT.pack_into(
            self._buffer, at, number, step, now, op.encode(), now, 1, NO_RANK, b""
        )
        return at

    def wait(self, what: str, from_rank: int) -> None:
        """Record that the op waits for something from another worker."""
        _TAIL.pack_into(
            self._buffer, self._at + _TAIL_AT, monotonic(), 2, from_rank, what.encode()
        )

    def resume(self) -> None:
        """Record that the op has received what it waited for."""
        _END.pack_into(self._buffer, self._at + _TAIL_AT, monotonic(), 1)

    def end(self, slot: int | None = None) -> None:
        """Record that the newest op is done, or the one in a slot."""
        at = self._at if slot is None else slot
        _END.pack_into(self._buffer, at + _TAIL_AT, monotonic(), 3)

    def entries(self) -> tuple[RecordedOp, ...]:
        """Return the last ops, oldest first."""
        return _entries(self._buffer[:])

    def newest(self) -> RecordedOp | None:
        """Return the last op; None before the first."""
        at = self._at
        found = _entries(
            self._buffer[: _HEADER.size] + self._buffer[at : at + _SLOT.size]
        )
        return found[0] if found else None


def read_flight_recorder(path: Path) -> RecorderSnapshot | None:
    """Read another process's recorder; None if it has made none yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _SIZE:
        return None
    magic, pid = _HEADER.unpack_from(data)
    return RecorderSnapshot(pid, _entries(data)) if magic == _MAGIC else None


def _entries(data: bytes) -> tuple[RecordedOp, ...]:
    slots = list(_SLOT.iter_unpack(data[_HEADER.size :]))
    return tuple(
        RecordedOp(
            step, _text(op), OpState(state), begun_s, changed_s, _text(what), rank
        )
        for number, step, begun_s, op, changed_s, state, rank, what in sorted(slots)
        if number and state in _STATES
    )


def _text(field: bytes) -> str:
    """Return the text in a fixed-size field; text that was too long is cut off."""
    return field.rstrip(b"\0").decode(errors="replace")
