"""Threads that jobs start: a job's prefetching, its ThreadPoolExecutor.

    share ── job a ── Thread(prefetch).start()     draws from torch's default generator:
          └─ job b                                 refused, and job a ends

torch's default generators hold the numbers of the job whose turn or draw it is: a draw
of another thread takes some of them. So `Thread.start` is replaced while jobs share: a
thread that a job's thread starts may draw from generators of its own only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from hocket.errors import HocketError, RunError
from hocket.sharing.running.random_state import THREAD, DrawGuard, DrawRule


class JobThreads(DrawRule):
    """The threads that one job starts.

    Args:
        job: the job's name.
        generators: the default generators of its device.

    Attributes:
        error: what ends the job: one of its threads has drawn.
        on_refused: called when one has.
    """

    def __init__(self, job: str, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self.error: HocketError | None = None
        self.on_refused: Callable[[], None] = lambda: None
        self.job, self._process, self._is_over = job, os.getpid(), False

    def enter(self) -> None:
        """Let the threads that the calling one starts be this job's."""
        _STARTER.threads = self

    def check(self) -> None:
        """Raise the error of a thread that has drawn."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def close(self) -> None:
        """Let threads draw again that outlive the job: they are the caller's."""
        self._is_over = True

    def start(self, thread: threading.Thread) -> None:
        """Let a thread, which is to be started, be one of these."""
        if os.getpid() == self._process:  # not in a DataLoader's worker
            run: Any = partial(self._run, thread.run)
            thread.run = run  # type: ignore[method-assign]

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Refuse to draw.

        Raises:
            RunError: says how a thread may draw.
        """
        if os.getpid() == self._process and not self._is_over:
            error = RunError(
                f"a thread that job {self.job!r} has started drew from torch's "
                f"default generator ({what}), whose numbers all jobs of the process "
                "take: give the thread a torch.Generator of its own, load data by a "
                "DataLoader with num_workers above 0, or use processes=True"
            )
            self._end(error)
            raise error
        yield

    def _end(self, error: HocketError) -> None:
        self.error = self.error or error
        self.on_refused()

    def _run(self, work: Callable[[], None]) -> None:
        """Do a thread's work; the job reports an error that what is shared causes."""
        self.enter()
        THREAD.draws = self
        try:
            with DrawGuard(self.job, self):
                work()
        except HocketError as error:
            self._end(error)


class _Starter(threading.local):
    """What is known of a thread that may start others.

    Attributes:
        threads: those of the job whose thread it is; None where it is no job's.
    """

    threads: JobThreads | None = None


_STARTER: Final = _Starter()


class _Replaced:
    """`Thread.start`, replaced as long as a call of `share` needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._start: Any = None

    def _put(self, start: Any) -> None:
        threading.Thread.start = start  # type: ignore[method-assign]

    def open(self) -> None:
        """Replace it, unless it is."""
        with self._lock:
            self._num_users += 1
            if self._num_users > 1:
                return
            self._start = start = threading.Thread.start

            def start_of_job(thread: threading.Thread) -> None:
                if _STARTER.threads is not None:
                    _STARTER.threads.start(thread)
                start(thread)

            self._put(start_of_job)

    def close(self) -> None:
        """Put it back, if no other call needs it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._put(self._start)


_REPLACED: Final = _Replaced()


@contextmanager
def threads_inherit() -> Iterator[None]:
    """Let threads that a job starts be known as its own, in the block."""
    _REPLACED.open()
    try:
        yield
    finally:
        _REPLACED.close()
