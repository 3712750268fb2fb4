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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch

from hocket.errors import HocketError, RunError
from hocket.model.trace.replaced import replaced
from hocket.sharing.running.random_state import THREAD, DrawGuard, DrawRule


class JobThreads(DrawRule):
    """The threads that one job starts.

    Args:
        job: the job's name.
        generators: the default generators of its device.

    Attributes:
        error: the first error of these threads; it ends the job.
        on_refused: called after each such error.
    """

    subject = "a thread that job {!r} has started"
    ways_out = "processes=True"

    def __init__(self, job: str, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self.error: HocketError | None = None
        self.on_refused: Callable[[], None] = lambda: None
        self.job, self._process, self._is_over = job, os.getpid(), False

    @property
    def is_in_force(self) -> bool:
        """See `DrawRule`."""
        return os.getpid() == self._process and not self._is_over

    def enter(self) -> None:
        """Count threads that the calling thread starts as this job's."""
        _STARTER.threads = self

    def check(self) -> None:
        """Raise the error of a thread that has drawn."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def close(self) -> None:
        """Allow draws again in threads that outlive all jobs."""
        self._is_over = True
        self.on_refused = lambda: None  # such a thread must not keep the jobs alive

    def start(self, thread: threading.Thread) -> None:
        """Wrap a thread's `run`, before it starts, to refuse draws."""
        if self.is_in_force:
            run: Any = partial(self._run, thread, thread.run)
            thread.run = run  # type: ignore[method-assign]

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Raise an error: these threads may not draw from the default generators.

        Raises:
            RunError: says how a thread may draw.
        """
        if self.is_in_force:
            error = RunError(
                f"{self.subject.format(self.job)} drew from torch's "
                f"default generator ({what}), whose numbers all jobs of the process "
                "take: give the thread a torch.Generator of its own, load data by a "
                "DataLoader with num_workers above 0, or use processes=True"
            )
            self.refused(error)
            raise error
        yield

    def refused(self, error: HocketError) -> None:
        """Let an error that is raised in a thread end the job."""
        self.error = self.error or error
        self.on_refused()

    def _run(self, thread: threading.Thread, work: Callable[[], None]) -> None:
        """Run a thread's function; the job reports what is refused in it."""
        vars(thread).pop("run", None)  # holds the thread itself
        self.enter()
        THREAD.draws = self
        try:
            with DrawGuard(self.job, self):
                work()
        except HocketError as error:
            if error is not self.error:
                raise


class _Starter(threading.local):
    """The job that the current thread belongs to.

    Attributes:
        threads: the threads of that job; None if the thread belongs to no job.
    """

    threads: JobThreads | None = None


_STARTER: Final = _Starter()


def shared_job() -> str | None:
    """Return the calling thread's job, if other jobs may run now; else None."""
    threads, draws = _STARTER.threads, THREAD.draws
    if threads is None or draws is None or not draws.is_in_force:
        return None
    return threads.job


def _start_of_job(start: Callable[..., None]) -> Callable[..., None]:
    def start_of_job(thread: threading.Thread) -> None:
        if _STARTER.threads is not None:
            _STARTER.threads.start(thread)
        start(thread)

    return start_of_job


def starts_seen() -> AbstractContextManager[None]:
    """Replace `Thread.start` in the block, to see which job starts a thread."""
    return replaced(threading.Thread, "start", by=_start_of_job)
