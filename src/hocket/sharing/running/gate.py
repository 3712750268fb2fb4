"""The board with a real clock: threads wait at its gates, and hung ones lose theirs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Final

from hocket.sharing.board import Board, JobRecord
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import ADMITTING, RUNNING, WAITING, Mode, Point


# What a running job asks of the gates, in this process or in another one.
class StoppedError(BaseException):
    """Ends a job's thread whose gate is closed for good. No error of the job."""


class Gates(ABC):
    """The gates of jobs that share a device. Methods raise `StoppedError`."""

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """How jobs share now."""

    @abstractmethod
    def wait_for_others(self, name: str) -> None:
        """Wait until all jobs are made; this one is."""

    @abstractmethod
    def leave(self, name: str) -> None:
        """Remove a job, if it was not abandoned; the others go on."""

    @abstractmethod
    def pass_through(self, name: str, point: Point) -> None:
        """Wait until the policy lets the job go on."""

    @abstractmethod
    def begin_backward(self, name: str) -> None:
        """Mark the start of a backward that no gate holds."""

    @abstractmethod
    def pause(self, name: str) -> None:
        """Mark that a job leaves a half of its iteration, in tick-tock."""

    @abstractmethod
    def finish(self, name: str, *, kind: str, goes_on: bool, is_watched: bool) -> None:
        """Mark the end of an iteration.

        Args:
            name: the job.
            kind: see `JobContext.kind`.
            goes_on: whether the job comes to its gate at once: then no other job is
                asked before it does, and it may go first again.
            is_watched: whether its memory was watched, which takes time.
        """

    @abstractmethod
    def must_watch(self, name: str) -> bool:
        """Return whether the memory of the job's next iterations is to be recorded."""

    @abstractmethod
    def observe(
        self, name: str, seen: Forecast, left_bytes: float, grown_bytes: float
    ) -> float:
        """Judge a job's forecast by what was recorded; see `Board.observe`."""


LOOK_S: Final = 1.0  # how often hung jobs are looked for
_END_S: Final = 1.0  # in which a job that must end comes to its next check
_WATCH_EVERY: Final = 200  # iterations


@dataclass(slots=True)
class JobGates(Gates):
    """The gates of all jobs that share a device.

    Args:
        board: what is known of them.
        timeouts_s: after which each job counts as hung.
        on_abandon: called with the name of a job that hangs.
        keeps_memory: whether what a hung job holds is lost.
        on_finish: called with the lock held after each iteration; may change the mode.
            It may return a function, which the thread that waits for the end calls
            without the lock: what takes long delays no job.

    Attributes:
        lock: guards the board.
        ended: the records of jobs that have left, by name.
        hung: the names of jobs that were abandoned.
        stop_error: the error that ends all jobs.
        all_made: set when jobs may begin their iterations, or end.
    """

    board: Board
    timeouts_s: dict[str, float] = field(default_factory=dict)
    on_abandon: Callable[[str], None] = lambda name: None
    keeps_memory: bool = True
    on_finish: Callable[[], Callable[[], None] | None] = lambda: None
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: dict[str, JobRecord] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    stop_error: BaseException | None = None
    all_made: threading.Event = field(default_factory=threading.Event)
    _later: Callable[[], None] | None = None
    _look_s: float = inf  # when those that wait look again
    # To wake a thread takes the interpreter from the one that trains: so each job waits
    # for its own condition, and the thread that waits for the end for another one.
    _doors: dict[str, threading.Condition] = field(default_factory=dict)
    _end: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        """All conditions have one lock."""
        self._end = threading.Condition(self.lock)

    def join(
        self, name: str, weight: float, max_slowdown: float, timeout_s: float
    ) -> None:
        """Add a job."""
        with self.lock:
            self.timeouts_s[name] = timeout_s
            self._doors[name] = threading.Condition(self.lock)
            self.board.join(
                name, perf_counter(), weight=weight, max_slowdown=max_slowdown
            )

    def begin(self) -> None:
        """Let the time begin in which jobs may hang: all are made."""
        with self.lock:
            for record in self.board.records.values():
                record.state.come_to(Point.AWAY, perf_counter())

    def wait_for_others(self, name: str) -> None:
        """See `Gates`."""
        self.all_made.wait()
        with self.lock:
            self._check(name)

    def leave(self, name: str) -> None:
        """See `Gates`."""
        with self.lock:
            if name not in self.board.records:
                return
            self.ended[name] = self.board.records[name]
            self.board.leave(name, perf_counter())
            self._open()
            self.wake_all()

    def pass_through(self, name: str, point: Point) -> None:
        """See `Gates`."""
        with self.lock:
            self._check(name)
            state, door = self.board.records[name].state, self._doors[name]
            self.board.wait(name, point, perf_counter())
            look_s = self._open()
            while state.point not in RUNNING:
                door.wait(min(max(look_s - perf_counter(), 0.0), LOOK_S))
                self._check(name)
                if state.point not in RUNNING:
                    self.abandon_hung()
                    look_s = self._open()

    def begin_backward(self, name: str) -> None:
        """See `Gates`."""
        with self.lock:
            self._check(name)
            self.board.begin_backward(name, perf_counter())
            if self.mode is not Mode.TURNS:  # its memory shrinks from now on
                self._open()

    def pause(self, name: str) -> None:
        """See `Gates`."""
        with self.lock:
            self._check(name)
            self.board.wait(name, Point.AWAY, perf_counter())
            self._open()

    def finish(self, name: str, *, kind: str, goes_on: bool, is_watched: bool) -> None:
        """See `Gates`."""
        with self.lock:
            self._check(name)
            self.board.finish(name, perf_counter(), kind=kind, is_watched=is_watched)
            if not is_watched:
                self.board.retime(name)
            self._later = self.on_finish() or self._later
            if self._later is not None:
                self._end.notify()
            if not goes_on:
                self._open()

    def must_watch(self, name: str) -> bool:
        """See `Gates`: where the forecast did not hold or is old, or the job grows."""
        record = self.board.records.get(name)
        if record is None:
            return False
        num_since = len(record.iterations) - record.num_seen
        is_old = self.mode in ADMITTING and num_since >= _WATCH_EVERY
        return is_old or record.grows or not record.memory_held

    def observe(
        self, name: str, seen: Forecast, left_bytes: float, grown_bytes: float
    ) -> float:
        """See `Gates`."""
        with self.lock:
            self._check(name)
            return self.board.observe(name, seen, left_bytes, grown_bytes)

    def end_soon(self, name: str) -> None:
        """Let a job count as hung unless it ends by itself: it may wait for ever."""
        with self.lock:
            record = self.board.records.get(name)
            if record is not None:
                spent_s = perf_counter() - record.state.point_s
                self.timeouts_s[name] = min(self.timeouts_s[name], spent_s + _END_S)

    def stop(self, error: BaseException) -> None:
        """End all jobs at their next gate."""
        with self.lock:
            self.stop_error = self.stop_error or error
            self.all_made.set()
            self.wake_all()

    def wake_all(self) -> None:
        """Let all that wait look again; call it with the lock held."""
        for condition in (self._end, *self._doors.values()):
            condition.notify()

    def wait_for_end(self) -> None:
        """Wait until all jobs have left, or hang."""
        while True:
            with self.lock:
                if not self.board.records:
                    return
                self._end.wait(LOOK_S)
                self.abandon_hung()
                later, self._later = self._later, None
            if later is not None:
                later()

    def _check(self, name: str) -> None:
        if name in self.hung or self.stop_error is not None:
            raise StoppedError

    def _open(self) -> float:
        """Open gates; return when to look again."""
        opened, look_s = self.board.open_gates(perf_counter())
        for name in self._doors if look_s < self._look_s else opened:
            self._doors[name].notify()
        self._look_s = look_s
        return look_s

    def abandon_hung(self, only: str | None = None) -> None:
        """Remove the jobs that have been at one point for too long.

        Args:
            only: the job that is looked at; all when not given.
        """
        now_s = perf_counter()
        for name, record in list(self.board.records.items()):
            if only not in (None, name):
                continue
            state = record.state
            is_late = now_s - state.point_s > self.timeouts_s[name]
            if is_late and state.point not in WAITING:
                self.hung.add(name)
                self.ended[name] = record
                self.board.leave(name, now_s, keeps_memory=self.keeps_memory)
                self.on_abandon(name)
                self._open()
                self.wake_all()

    @property
    def mode(self) -> Mode:
        """See `Gates`."""
        return self.board.mode
