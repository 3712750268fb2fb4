"""SIGTERM asks a job to end: at once, or at the end of a step, where all can save.

    rank 0   step 7 │ step 8 ─────│ saves, ends     it reaches ranks at different
    rank 1   step 7 │ step 8 ─────│ saves, ends     steps, or one rank alone
                        ▲      ▲
                 signal ┘      └ the losses of step 8, which rank 1 hands to all, say so

So agreeing takes no message of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

import torch.distributed as dist

from hocket.errors import ConfigError
from hocket.run.diagnostics.process_wide import is_free, signal_handler

_KEY: Final = "asked to stop"
_LOOK_S: Final = 1.0  # between looks in the store, of a worker that has no signal


class StoppedBySignal(SystemExit):
    """A signal asked the process to end.

    Attributes:
        number: the signal's.
        code: 128 + the signal's number, as shells write it.
    """

    def __init__(self, number: int) -> None:
        """Keep the exit code, so that an uncaught one ends the process with it."""
        super().__init__(128 + number)
        self.number = number


class StopRequest:
    """What one worker knows of a SIGTERM to its job.

    Args:
        store: the store that all workers share, under this attempt's prefix.
        world_size: number of workers.

    Attributes:
        is_asked: whether the signal has come, to this worker or to another.
        is_agreed: whether all workers end after the last step whose losses they have.
    """

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self.is_asked = self.is_agreed = False
        self._is_awaited = False  # else a signal ends this process at once
        self._store = store
        self._is_alone = world_size == 1
        self._is_posted = False
        self._looked_s = monotonic()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Only note a SIGTERM in a block; one that is not answered then comes again.

        Raises:
            ConfigError: the process has a handler of its own; or this is not its main
                thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not is_free(signal.SIGTERM):
            raise ConfigError(
                "on_sigterm: this process has a SIGTERM handler of its own: let that "
                "one save, or leave it out"
                if is_main
                else "on_sigterm: Python handles signals in the main thread: train in "
                "that one, or save at steps of your own choice"
            )
        self._is_awaited = True
        try:
            with signal_handler(signal.SIGTERM, self._note):
                yield
        finally:
            self._is_awaited = False
        if self.is_asked or self.is_agreed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, *_: object) -> None:
        self.is_asked = True

    def post(self) -> None:
        """Let the worker that hands out the losses see this worker's signal."""
        if self.is_asked and not self._is_posted and not self._is_alone:
            self._is_posted = True
            self._store.set(_KEY, "")

    def looked(self) -> bool:
        """Return whether any worker has a signal; asked with each step's losses.

        Raises:
            WaitError: the store is lost.
        """
        looks = self._is_awaited and not self.is_asked and not self._is_alone
        if looks and monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = monotonic()
            self.is_asked = self._store.check([_KEY])
        return self.is_asked
