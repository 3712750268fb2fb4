"""Finds accesses of two lanes that no path of events orders, while the lanes run.

A vector clock for each lane counts how often each lane has recorded an event, as far as
the lane has waited for it. An access is ordered before another one if the later lane's
clock has reached the count at which the earlier one happened:

    lane 0   write y  [0: 1]  record e ─────────────────┐        clock of lane 0 is 2
    lane 1   read y, no wait: knows 0 of lane 0 < 1     │        a race
    lane 1                                      wait e ─┘ read y: knows 1 >= 1, ordered

Times play no part: a missing wait is found in each interleaving, also in a lucky one.
Submitting an op orders nothing, since a CUDA stream may run it at any later time.

Source: Flanagan and Freund, "FastTrack", PLDI 2009, sections 2 and 3.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from hocket.errors import RaceError

Clock: TypeAlias = tuple[int, ...]  # a count for each lane, and one for the caller


@dataclass(frozen=True, slots=True)
class _Access:
    lane: int
    count: int  # of the lane's own clock then
    label: str
    writes: bool

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.label} in lane {self.lane} {verb}"


@dataclass(slots=True)
class _History:
    """The accesses to one resource that later ones must be ordered after."""

    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)  # the last of each lane

    def before(self, *, writes: bool) -> list[_Access]:
        """Return the accesses that conflict with a new one."""
        found = [] if self.write is None else [self.write]
        return [*found, *self.reads.values()] if writes else found

    def add(self, access: _Access) -> None:
        """Add an access; drop those that every later access is ordered after anyway."""
        if access.writes:
            self.write = access
            self.reads.clear()
        else:
            self.reads[access.lane] = access


class Sanitizer:
    """Checks the accesses of one device's lanes; all methods are safe between threads.

    Args:
        num_lanes: the number of the device's lanes.
    """

    def __init__(self, num_lanes: int) -> None:
        self._lock = threading.Lock()
        lanes = range(num_lanes + 1)  # the last one is the caller
        self._clocks = [[int(i == j) for j in lanes] for i in lanes]
        self._histories: dict[Hashable, _History] = {}

    def access(
        self, lane: int, label: str, resource: Hashable, *, writes: bool
    ) -> None:
        """Check one access against all earlier ones, and record it.

        Args:
            lane: the number of the lane in which the op runs.
            label: the op's text.
            resource: the resource that the op uses; its text stands in the error.
            writes: whether the op changes the resource, or only reads it.

        Raises:
            RaceError: an access of another lane conflicts, and no event orders the two.
        """
        with self._lock:
            clock = self._clocks[lane]
            new = _Access(lane, clock[lane], label, writes)
            history = self._histories.setdefault(resource, _History())
            for old in history.before(writes=writes):
                if old.lane != lane and old.count > clock[old.lane]:
                    raise _race(old, new, resource)
            history.add(new)

    def record(self, lane: int) -> Clock:
        """Record an event: lanes that wait for it come after all of this lane so far.

        Returns:
            The clock that `wait` takes in each lane that waits for the event.
        """
        with self._lock:
            recorded = tuple(self._clocks[lane])
            self._clocks[lane][lane] += 1
            return recorded

    def wait(self, lane: int, recorded: Clock) -> None:
        """Let a lane wait for an event. A wait of the host alone orders no lanes."""
        with self._lock:
            _raise_to(self._clocks[lane], recorded)

    def join(self) -> None:
        """Order the caller's work from now on after all lanes' work so far."""
        with self._lock:
            self._join()

    def fork(self) -> None:
        """Order the lanes' work from now on after the caller's work so far."""
        with self._lock:
            self._fork()

    def synchronize(self) -> None:
        """Order all work of the lanes from now on after all of it so far."""
        with self._lock:
            self._join()
            self._fork()
            self._histories.clear()

    def _join(self) -> None:
        caller = self._clocks[-1]
        for lane, clock in enumerate(self._clocks[:-1]):
            _raise_to(caller, clock)
            clock[lane] += 1

    def _fork(self) -> None:
        for clock in self._clocks[:-1]:
            _raise_to(clock, self._clocks[-1])


def _raise_to(clock: list[int], other: Clock | list[int]) -> None:
    """Raise each count of `clock` to that of `other`."""
    clock[:] = map(max, clock, other)


def _race(old: _Access, new: _Access, resource: Hashable) -> RaceError:
    return RaceError(
        f"{old} {resource}, and {new} it, but no path of events orders the two: let "
        f"{new.label} wait for an event that {old.label} or a later op of lane "
        f"{old.lane} records, or the other way round, or put both into one lane",
        resource=str(resource),
        ops=(old.label, new.label),
        lanes=(old.lane, new.lane),
    )
