"""Watches worker processes for the launcher: when each ended, and which hang.

When a worker fails, torch's launcher asks the others to end and waits 30 s for those
that do not. Workers of ours answer within a second
(run/cluster/reporting.py); one that does not answer hangs, or is stopped. It is
killed here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hocket.run.cluster.store.poll import poll
from hocket.run.diagnostics.flight_recorder import read_flight_recorder
from hocket.run.diagnostics.job_folder import WorkerFiles

GRACE_S: Final = 2.5  # from the first failure to the end of those that do not answer
_POLL_S: Final = 0.05


@dataclass(slots=True)
class WorkerWatch:
    """Watches the workers of one attempt.

    Args:
        folder: the attempt's folder.
        num_workers: workers that this process has started.
        ended_s: when each rank ended, in seconds since 1970.
        codes: the exit code of each rank; minus the signal's number if a signal killed
            it. Torch's launcher may reap a process first, and the kernel reports its
            code only once.
        hung: the ranks that had to be killed.
    """

    folder: Path
    num_workers: int
    ended_s: dict[int, float] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    _pids: dict[int, int] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on, in a thread."""
        name = "hocket-watch"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def kill(self) -> None:
        """Kill all workers that are left, and wait until they are gone."""
        for rank in range(self.num_workers):
            snapshot = read_flight_recorder(WorkerFiles(self.folder, rank).recorder)
            if snapshot is not None:
                self._pids[rank] = snapshot.pid
                _kill(snapshot.pid)
        # One that stays is in the kernel, which will end it when it can.
        poll(lambda: not any(map(_is_alive, self._pids.values())), GRACE_S)

    def _run(self) -> None:
        failed_s = float("inf")
        with selectors.DefaultSelector() as selector:
            while not self._stop.is_set():
                self._find(selector)
                for key, _ in selector.select(_POLL_S):
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    self._note_end(key.data)
                if failed_s == float("inf") and self._has_failure():
                    failed_s = time.monotonic()
                if time.monotonic() - failed_s > GRACE_S:
                    self._kill_hung()
            for key in list(selector.get_map().values()):
                os.close(key.fd)

    def _find(self, selector: selectors.BaseSelector) -> None:
        """Watch the workers that have started since the last look."""
        for rank in set(range(self.num_workers)) - set(self._pids):
            snapshot = read_flight_recorder(WorkerFiles(self.folder, rank).recorder)
            if snapshot is None:
                continue
            self._pids[rank] = snapshot.pid
            try:
                handle = os.pidfd_open(snapshot.pid)
            except ProcessLookupError:
                self._note_end(rank)
                continue
            selector.register(handle, selectors.EVENT_READ, rank)

    def _note_end(self, rank: int) -> None:
        self.ended_s[rank] = time.time()
        with contextlib.suppress(ChildProcessError):
            # Not reaped: torch's launcher must still be able to read its exit code.
            asked = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, self._pids[rank], asked)
            if found is not None:
                exited = found.si_code == os.CLD_EXITED
                self.codes[rank] = found.si_status if exited else -found.si_status

    def _has_failure(self) -> bool:
        """Return whether a worker has ended without a result."""
        results = (WorkerFiles(self.folder, rank).result for rank in self.ended_s)
        return not all(result.exists() for result in results)

    def _kill_hung(self) -> None:
        for rank in set(self._pids) - set(self.ended_s) - self.hung:
            self.hung.add(rank)
            _kill(self._pids[rank])


def _kill(pid: int) -> None:
    """Kill a worker and what it has started: it leads a process group of its own."""
    # A pid may have been reused by now; those of our children cannot.
    if _is_alive(pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    """Return whether a process is a child of this one and has not ended."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is None
