"""Starts the worker processes of one attempt, waits for them, and ends them.

    one fails  ──0.1 s──▶ SIGTERM to the others ──2.5 s──▶ SIGKILL: they hang
    asked to end         SIGTERM to all         ──30 s───▶ SIGKILL, as torchrun

Workers answer a signal within a second (run/cluster/reporting.py), or after a step and
a save (run/cluster/stop.py). One that does not answer hangs, or is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from subprocess import Popen
from typing import Final

_NOTICE_S: Final = 0.1  # for the others to notice a failure by themselves
GRACE_S: Final = 2.5  # from a signal to the end of those that do not answer
SAVE_S: Final = 30.0  # and of those that may save before


class WorkerProcesses:
    """The worker processes of one attempt, each in a session of its own.

    Args:
        command: the command line of all workers.
        environments: the environment variables of each worker, by rank.
        descriptors: what they inherit besides the standard three.

    Attributes:
        ended_s: when each rank ended, in seconds since 1970.
        hung: the ranks that had to be killed after a failure.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.ended_s: dict[int, float] = {}
        self.hung: set[int] = set()
        self._command = command
        self._environments = environments
        self._descriptors = descriptors
        self._processes: list[Popen[bytes]] = []
        self._running: dict[int, int] = {}  # ranks, by their processes' descriptors

    @property
    def codes(self) -> dict[int, int]:
        """The exit codes of those that have ended; minus a signal that killed one."""
        return {rank: self._processes[rank].wait() for rank in self.ended_s}

    def start(self) -> None:
        """Start all workers."""
        for variables in self._environments:
            process = Popen(
                self._command,
                env=variables,
                start_new_session=True,
                pass_fds=self._descriptors,
            )
            self._running[os.pidfd_open(process.pid)] = len(self._processes)
            self._processes.append(process)

    def wait(self) -> bool:
        """Wait until all have ended; return whether all exit codes are 0.

        After a failure the others are asked to end, and killed if they do not.
        """
        while self._running and not any(self.codes.values()):
            self._note_ends(None)
        if self._running:
            self._wait_for(_NOTICE_S)
            self.stop(signal.SIGTERM)
            self.hung.update(self._running.values())
            self.stop(signal.SIGKILL)
        return not any(self.codes.values())

    def stop(self, number: signal.Signals, grace_s: float = GRACE_S) -> None:
        """Send a signal to those that run and what they have started; give them time.

        A worker that stays after SIGKILL is in the kernel, which will end it.
        """
        for rank in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, number)
        self._wait_for(grace_s)

    def _wait_for(self, seconds: float) -> None:
        """Wait until all have ended, or the time is up."""
        until_s = time.monotonic() + seconds
        while self._running and time.monotonic() < until_s:
            self._note_ends(until_s - time.monotonic())

    def _note_ends(self, timeout_s: float | None) -> None:
        """Wait until some have ended, or the time is up."""
        for handle in wait(list(self._running), timeout_s):
            assert isinstance(handle, int)
            rank = self._running.pop(handle)
            self.ended_s[rank] = time.time()
            os.close(handle)
            with contextlib.suppress(ProcessLookupError):  # what it has left behind
                os.killpg(self._processes[rank].pid, signal.SIGKILL)
