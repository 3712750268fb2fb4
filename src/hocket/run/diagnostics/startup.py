"""Reports what a pipeline does before its first step, if that takes long.

    seconds   0                 2              7          11
    does      capture           │   measure layers        │ dry run       ready
    reports                     capture   measure   ...   dry run

A pipeline that is ready within two seconds reports nothing. After that, each new
activity is reported when it begins, and again while it lasts. A thread does that:
capturing or compiling a model may be one long call, and so may the user's hook.

Reports go to the logger `hocket`. A script that has set up no logging and has no hook
gets them on stderr, as a start of a minute without a word looks like one that hangs;
`logging.getLogger("hocket").setLevel("WARNING")` silences them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Final, Self

AFTER_S: Final = 2.0  # pipelines that are ready sooner report nothing
EVERY_S: Final = 5.0  # between two reports of one activity
END_S: Final = 5.0  # a hook that takes longer holds up the first step no more

log = logging.getLogger("hocket")


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """What a pipeline does before its first step.

    Args:
        what: the activity, such as "capturing the model".
        seconds: since the capture began.
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


@dataclass(eq=False)
class StartupReporter:
    """Passes activities on to the log and the user's hook; use as a context manager.

    Where there is neither a hook nor any logging set up, they go to stderr. A hook that
    fails is logged with its traceback, and not called again.

    Args:
        hook: the user's.
        is_leader: whether this is rank 0; the others report nothing.
        after_s: the seconds before the first report; 2 unless given.
    """

    hook: StartupHook | None
    is_leader: bool
    after_s: float = field(default_factory=lambda: AFTER_S)

    def __post_init__(self) -> None:
        self._begun = SimpleQueue[StartupProgress | None]()  # None: no more of them
        self._over = Event()
        self._begin_s = perf_counter()
        self._thread = Thread(
            target=self._report_all, name="hocket start-up", daemon=True
        )

    def __enter__(self) -> Self:
        """Start the reporting thread."""
        if self.is_leader:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Report what is left, for a few seconds at most, and nothing from then on."""
        if self.is_leader:
            self._begun.put(None)
            self._thread.join(END_S)
        self._over.set()

    def __call__(self, progress: StartupProgress) -> None:
        """Note an activity; it is reported if it is a new one, and it is time.

        Args:
            progress: the activity; its seconds are counted when it is reported.
        """
        if self.is_leader and not self._over.is_set():
            self._begun.put(progress)

    def _report_all(self) -> None:
        """Report new activities when they begin, and the last one while it lasts."""
        first_s = due_s = self._begin_s + self.after_s
        now: StartupProgress | None = None
        said = ""
        while not self._over.is_set():
            try:
                found = self._begun.get(timeout=max(0.0, due_s - perf_counter()))
            except Empty:
                pass
            else:
                if found is None:
                    return
                now = found
                if now.what == said or perf_counter() < first_s:
                    continue
            if now is not None:
                said = now.what
                self._report(now)
            due_s = perf_counter() + EVERY_S

    def _report(self, progress: StartupProgress) -> None:
        progress = replace(progress, seconds=perf_counter() - self._begin_s)
        log.info("%s", progress)
        if self.hook is None:
            if not (log.level or log.hasHandlers()):  # the user has set up none
                print(f"hocket: {progress}", file=sys.stderr, flush=True)
            return
        try:
            self.hook(progress)
        except Exception:
            self.hook = None
            log.exception(
                "progress= failed at %s; the pipeline goes on without it", progress
            )
