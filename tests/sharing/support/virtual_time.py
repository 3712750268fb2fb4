"""Time that passes only while all jobs sleep: what runs between takes none of it.

Jobs that sleep to emulate a device depend on how soon a busy machine wakes them. Here
the clock stands still until each job's thread sleeps or waits at its gate, and nobody
plans; then it jumps to the first that has slept long enough, and wakes this one alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from hocket.sharing.running import memory_log
from hocket.sharing.running.memory_log import StorageLog

JOB: Final = "hocket job"  # how names of their threads begin
TICK_S: Final = 0.01  # real seconds, for jobs that have ended
GATE: Final = "hocket.sharing.running.gate"
CLOCKS: Final = (
    GATE,
    "hocket.sharing.running.memory_log",
    "tests.sharing.support.jobs",
)


class VirtualTime:
    """A clock for threads of jobs, and for the one that makes it and waits for them."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._abandoned = {*threading.enumerate()}  # by tests before, maybe
        self._now_s = 0.0
        self._lock = threading.RLock()  # freed storages ask for the time
        self.changed = threading.Event()
        self._asleep: dict[int, tuple[float, Callable[[], None]]] = {}

    def perf_counter(self) -> float:
        """Return the seconds that have passed; no two moments are the same."""
        with self._lock:
            self._now_s += 1e-9
            return self._now_s

    def sleep_until(self, end_s: float) -> None:
        """Let this thread sleep."""
        woken = threading.Event()
        self.fall_asleep(end_s, woken.set)
        woken.wait()

    def fall_asleep(self, end_s: float, wake: Callable[[], None]) -> None:
        """Let the time pass as far as this thread is concerned."""
        with self._lock:
            self._asleep[threading.get_ident()] = (end_s, wake)
        self.changed.set()

    def wake(self, ident: int) -> None:
        """Let no time pass until this thread sleeps again."""
        with self._lock:
            self._asleep.pop(ident, None)

    def tick(self) -> None:
        """Wake the first one, if all sleep."""
        with self._lock:
            threads = {*threading.enumerate()} - self._abandoned
            jobs = {x.ident or 0: x.name for x in threads if x.name.startswith(JOB)}
            if not jobs or not self._asleep.keys() >= jobs.keys() | {self._main}:
                return
            first = min(jobs, key=lambda x: (self._asleep[x][0], jobs[x]))
            if self._asleep[first][0] == inf:
                return
            end_s, wake = self._asleep.pop(first)
            self._now_s = max(self._now_s, end_s)
        wake()


def door_type(clock: VirtualTime) -> type[threading.Condition]:
    """Return conditions whose time is the clock's for jobs."""

    class Door(threading.Condition):
        ident = 0  # of the thread that waits

        def wait(self, timeout: float | None = None) -> bool:
            """Sleep until somebody opens, or the time is over."""
            thread = threading.current_thread()
            self.ident = thread.ident or 0
            if thread.name.startswith(JOB):
                end_s = inf if timeout is None else clock.perf_counter() + timeout
                clock.fall_asleep(end_s, self._open)
                return super().wait()
            clock.fall_asleep(inf, self._open)
            try:
                return super().wait(timeout)
            finally:
                clock.wake(self.ident)

        def notify(self, n: int = 1) -> None:
            """Wake who waits."""
            clock.wake(self.ident)
            self.ident = 0
            super().notify(n)

        def _open(self) -> None:
            with self:
                self.notify()

    return Door


def storage_log(*, is_cuda: bool) -> StorageLog:
    """Return a log that reads the clock."""
    return StorageLog(torch.device("cuda" if is_cuda else "cpu"))


@contextmanager
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let jobs of one process share a device in virtual time."""
    clock, ends = VirtualTime(), threading.Event()

    def run() -> None:
        while not ends.is_set():
            clock.changed.wait(TICK_S)
            clock.changed.clear()
            clock.tick()

    for module in CLOCKS:
        monkeypatch.setattr(f"{module}.perf_counter", clock.perf_counter)
    monkeypatch.setattr(f"{CLOCKS[-1]}.sleep_until", clock.sleep_until)
    # torch's profiler would stamp allocations with the time that really passes.
    monkeypatch.setattr(memory_log, "_ProfilerLog", storage_log)
    made: Any = SimpleNamespace(**{**vars(threading), "Condition": door_type(clock)})
    monkeypatch.setattr(f"{GATE}.threading", made)
    ticker = threading.Thread(target=run, daemon=True)
    ticker.start()
    yield
    ends.set()
    ticker.join()
