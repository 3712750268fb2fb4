"""Reports what a pipeline does before its first step, if that takes long.

    seconds   0                 2              7          11
    does      capture           │   measure layers        │ dry run       ready
    reports                     capture   measure   ...   dry run

A pipeline that is ready within two seconds reports nothing. After that, each new
activity is reported when it begins, and again while it lasts: a thread does that, since
capturing or compiling a model may be one long call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Event, RLock, Thread
from time import perf_counter
from types import TracebackType
from typing import Final, Self

AFTER_S: Final = 2.0  # pipelines that are ready sooner report nothing
EVERY_S: Final = 5.0  # between two reports of one activity

log = logging.getLogger("hocket")


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """What a pipeline does before its first step.

    Args:
        what: the activity, such as "capturing the model".
        seconds: since the pipeline's workers joined.
        num_done: how much of the activity is done; None if it is not counted.
        num_all: how much there is; None if that is not known.
    """

    what: str
    seconds: float = 0.0
    num_done: int | None = None
    num_all: int | None = None

    def __str__(self) -> str:
        """Write one line.

        >>> print(StartupProgress("choosing the order", 3.21, 120, 1212))
        choosing the order: 120 of 1,212 (3.2 s)
        """
        counted = ""
        if self.num_done is not None and self.num_all is not None:
            counted = f": {self.num_done:,} of {self.num_all:,}"
        return f"{self.what}{counted} ({self.seconds:.1f} s)"


StartupHook = Callable[[StartupProgress], object]


class StartupReporter:
    """Passes activities on to the log and the user's hook; `with` it while they last.

    A hook that fails is logged with its traceback, and not called again.

    Args:
        hook: the user's.
        is_leader: whether this is rank 0; the others report nothing.
        after_s: the seconds before the first report.
        every_s: the seconds between two reports of one activity.
    """

    def __init__(
        self,
        hook: StartupHook | None,
        *,
        is_leader: bool,
        after_s: float,
        every_s: float,
    ) -> None:
        self._hook = hook
        self._is_leader = is_leader
        self._after_s, self._every_s = after_s, every_s
        self._lock = RLock()  # a hook may make a pipeline, too
        self._over = Event()
        self._begin_s = perf_counter()
        self._now: StartupProgress | None = None
        self._said = ""  # the last activity that was reported

    def __enter__(self) -> Self:
        """Begin to count the seconds."""
        if self._is_leader:
            Thread(target=self._repeat, name="hocket start-up", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Report nothing from now on."""
        with self._lock:
            self._over.set()

    def __call__(self, progress: StartupProgress) -> None:
        """Note an activity; report it if it is a new one, and it is time.

        Args:
            progress: the activity; its seconds are counted here.
        """
        if not self._is_leader:
            return
        with self._lock:
            self._now = progress
            is_new = progress.what != self._said
            if is_new and perf_counter() - self._begin_s >= self._after_s:
                self._report()

    def _repeat(self) -> None:
        wait_s = self._after_s
        while not self._over.wait(wait_s):
            with self._lock:
                self._report()
            wait_s = self._every_s

    def _report(self) -> None:
        if self._now is None or self._over.is_set():
            return
        self._said = self._now.what
        progress = replace(self._now, seconds=perf_counter() - self._begin_s)
        log.info("%s", progress)
        if self._hook is None:
            return
        try:
            self._hook(progress)
        except Exception:
            self._hook = None
            log.exception(
                "progress= failed at %s; the pipeline goes on without it", progress
            )
