"""A thread that writes one checkpoint while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

from hocket.errors import CheckpointError, HocketError, RunError

_NICENESS: Final = 19  # training has the cores first


class BackgroundWriter:
    """Writes one checkpoint at a time; `wait` raises its errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: HocketError | None = None
        self._is_abandoned = threading.Event()

    def start(self, write: Callable[[], object]) -> None:
        """Start to write; the previous checkpoint must have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="hocket checkpoint", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is being written, without raising errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the checkpoint could not be written.
            RunError: another worker failed to take part.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self, grace_s: float) -> None:
        """Wait a little for the end; then stop writing and remove the files."""
        if self._thread is not None:
            self._thread.join(grace_s)
            self._is_abandoned.set()
            self._thread.join(grace_s)
            self._thread = self._error = None

    def wants_more(self) -> None:
        """Raise if the writing is to stop; the writer calls this now and then.

        Raises:
            CheckpointError: the writing was abandoned.
        """
        if self._is_abandoned.is_set():
            raise CheckpointError("the run ended while its checkpoint was written")

    def _run(self, write: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            write()
        except HocketError as error:
            self._error = error
        except Exception as error:
            self._error = RunError(f"writing a checkpoint: {error!r}")
