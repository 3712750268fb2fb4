"""Starts the workers of one machine, waits for them, and reports their failures.

The workers find each other in a file. Nothing listens but their own gloo and NCCL, on
the loopback.

    launch ──▶ WorkerProcesses ──▶ python -c ... job.json   (rank 0)  ─┐
        │                     └──▶ python -c ... job.json   (rank 1)  ─┤ rings, reports
        │                                                              ▼
        └───────────────────────── <run>/workers/job-.../attempt-0/ ◀──┘
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import Popen
from typing import Any, Final, NoReturn

from hocket import env
from hocket.env import ExitCode
from hocket.errors import RunError, WorkerError
from hocket.run.cluster.entry import inherited_entry
from hocket.run.cluster.start import PROGRAM, WorkerStart
from hocket.run.diagnostics.failure import (
    FailureCause,
    FailureReport,
    as_json,
    failure_headline,
    first_failures,
    read_report,
    silent_failure_report,
    stopped_at,
    worker_error,
)
from hocket.run.diagnostics.flight_recorder import read_flight_recorder
from hocket.run.diagnostics.job_folder import (
    Json,
    WorkerFiles,
    attempt_dir,
    new_job_dir,
    store_path,
    write_json,
)
from hocket.run.diagnostics.process_wide import signal_handler

# Starts the worker processes of one attempt, waits for them, and ends them.
#
#     one fails  ──0.1 s──▶ SIGTERM to the others ──2.5 s──▶ SIGKILL: they hang
#     asked to end         SIGTERM to all         ──30 s───▶ SIGKILL, as torchrun
#
# Workers answer a signal within a second (run/cluster/reporting.py), or after a step
# and a save (run/cluster/stop.py). One that does not answer hangs, or is stopped.


_NOTICE_S: Final = 0.1  # for the others to notice a failure by themselves
GRACE_S: Final = 2.5  # from a signal to the end of those that do not answer
SAVE_S: Final = 30.0  # and of those that may save before


@dataclass(eq=False)
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

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    descriptors: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.ended_s: dict[int, float] = {}
        self.hung: set[int] = set()
        self._processes: list[Popen[bytes]] = []
        self._running: dict[int, int] = {}  # ranks, by their processes' descriptors

    @property
    def codes(self) -> dict[int, int]:
        """The exit codes of those that have ended; minus a signal that killed one."""
        return {rank: self._processes[rank].wait() for rank in self.ended_s}

    def start(self) -> None:
        """Start all workers."""
        for variables in self.environments:
            process = Popen(
                self.command,
                env=variables,
                start_new_session=True,
                pass_fds=self.descriptors,
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


log = logging.getLogger(__name__)

# Codes of failures that do not depend on the machine or the hour.
_DETERMINED: Final = frozenset({ExitCode.USAGE, ExitCode.PLAN, ExitCode.NON_FINITE})


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class _StoppedBySignal(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number: Final = signal.Signals(number)


def launch(
    entry: str | Callable[..., Json],
    args: Sequence[Json] = (),
    *,
    num_workers: int,
    run_dir: Path | str | None = None,
    timeout_s: float = 60.0,
    max_restarts: int = 0,
) -> list[Any]:
    """Run a function in `num_workers` processes of this machine, and wait for them.

    Each process joins the others with `join_world`. A script that calls this must guard
    the call with `if __name__ == "__main__":`, since its workers import it. A notebook,
    a prompt or a script from standard input needs no guard: there the workers get the
    function by value, with all that it refers to.

    Args:
        entry: `"module:function"`, or a function. One that no module or script defines
            at its top is pickled by cloudpickle (`pip install 'hocket[notebook]'`).
        args: the function's arguments: JSON values only.
        num_workers: processes; unless OMP_NUM_THREADS is set, they share the cores.
        run_dir: the run's folder; after a failure, the workers' reports are in it. A
            folder among temporary files, which the error names, when not given.
        timeout_s: how long a worker waits for another.
        max_restarts: how often all workers are started again after a failure; not after
            one that would come again: data, a model or a plan that is not valid, a
            loss that is no number.

    Returns:
        What each worker's function returned, by rank.

    Raises:
        WorkerError: a worker failed; the first failure is on top.
        RunError: this process is a worker itself, or the function cannot be sent.
        MissingPackageError: the function must be pickled, and cloudpickle is missing.
        KeyboardInterrupt: Ctrl-C; the workers have ended.
        SystemExit: another signal asked this process to end; the workers have ended.
    """
    _refuse_inside_a_worker()
    if num_workers < 1:
        raise RunError(f"num_workers={num_workers}: start at least one worker")
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        if not isinstance(entry, str):
            entry, descriptors = stack.enter_context(inherited_entry(entry))
        job = WorkerStart(
            entry=entry,
            args=list(args),
            sys_path=[str(Path(path).absolute()) for path in sys.path],
            argv=sys.argv,
        )
        given = None if run_dir is None else Path(run_dir)
        folder = new_job_dir(given)
        where = given or folder
        attempts = _Attempts(folder, num_workers, max_restarts, timeout_s, descriptors)
        (where / "failure.json").unlink(missing_ok=True)
        write_json(folder / "job.json", job)
        return _results(attempts, where)


def _results(attempts: _Attempts, run_dir: Path) -> list[Any]:
    """Run the attempts; return what the workers returned, and remove their files."""
    try:
        with _signals_raised():
            succeeded = attempts.run()
    except _StoppedBySignal as stopped:
        positions = attempts.positions()
        is_term = stopped.number is signal.SIGTERM
        attempts.workers.stop(stopped.number, SAVE_S if is_term else GRACE_S)
        attempts.workers.stop(signal.SIGKILL)
        attempts.remove()
        raise _stopped(stopped.number, positions) from None
    finally:
        attempts.workers.stop(signal.SIGKILL)
    if not succeeded:
        raise attempts.failure(run_dir)
    results = [json.loads(files.result.read_bytes()) for files in attempts.files()]
    attempts.remove()
    return results


@dataclass(slots=True)
class _Attempts:
    """The attempts of one job; more than one only if workers are restarted.

    Args:
        folder: the job's folder.
        num_workers: workers of each attempt.
        max_restarts: how often the workers may be started again.
        timeout_s: the workers' timeout.
        descriptors: what the workers inherit.
    """

    folder: Path
    num_workers: int
    max_restarts: int
    timeout_s: float
    descriptors: Sequence[int] = ()
    number: int = 0
    workers: WorkerProcesses = field(default_factory=lambda: WorkerProcesses((), ()))

    def run(self) -> bool:
        """Run attempts until one succeeds; return whether one did."""
        while not self._succeeds():
            if self.number == self.max_restarts or self._would_fail_again():
                return False
            self.number += 1
        return True

    def _succeeds(self) -> bool:
        """Run one attempt; return whether all of its workers succeeded."""
        self.workers = WorkerProcesses(
            (sys.executable, "-c", PROGRAM, str(self.folder / "job.json")),
            [self._environment(rank) for rank in range(self.num_workers)],
            self.descriptors,
        )
        self.workers.start()
        return self.workers.wait()

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a worker."""
        threads = env.THREADS.text()
        if not env.THREADS.is_set:
            num_cores = len(os.sched_getaffinity(0))
            threads = str(max(1, num_cores // self.num_workers))
        return env.with_variables(
            {
                env.THREADS: threads,
                env.RANK: str(rank),
                env.WORLD_SIZE: str(self.num_workers),
                env.LOCAL_RANK: str(rank),
                env.LOCAL_WORLD_SIZE: str(self.num_workers),
                env.ATTEMPT: str(self.number),
                env.JOB_DIR: str(self.folder),
                env.LAUNCHER_PID: str(os.getpid()),
                env.TIMEOUT_S: repr(self.timeout_s),
            }
        )

    def files(self) -> list[WorkerFiles]:
        """Return the files of each worker in the last attempt."""
        folder = attempt_dir(self.folder, self.number)
        return [WorkerFiles(folder, rank) for rank in range(self.num_workers)]

    def positions(self) -> str:
        """Describe where each worker stands, in one line."""
        places = []
        for files in self.files():
            snapshot = read_flight_recorder(files.recorder)
            if snapshot is not None and snapshot.entries:
                places.append(f"rank {files.rank} {stopped_at(snapshot.entries[-1])}")
        return ", ".join(places)

    def failure(self, run_dir: Path) -> WorkerError:
        """Return the last attempt's error, also written to `failure.json`."""
        reports = self._reports()
        for files in self.files():
            files.result.unlink(missing_ok=True)
            store_path(files.folder).unlink(missing_ok=True)
            if files.faults.exists() and not files.faults.stat().st_size:
                files.faults.unlink()
        error = worker_error(reports, self.files()[0].folder)
        root_cause = {
            "message": str(error),
            "reports": [as_json(report) for report in first_failures(reports)],
        }
        with contextlib.suppress(RunError):  # no room: the error says it all
            write_json(run_dir / "failure.json", root_cause)
        return error

    def remove(self) -> None:
        """Remove the job's files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another job's may be there
            self.folder.parent.rmdir()

    def _reports(self) -> list[FailureReport]:
        """Return each failed worker's report, or what the launcher knows of it."""
        reports = []
        codes = self.workers.codes
        for files in self.files():
            report, hung = read_report(files.report), files.rank in self.workers.hung
            code = codes.get(files.rank, 0)
            if report is None and (hung or code):
                ended_s = self.workers.ended_s.get(files.rank, time.time())
                report = silent_failure_report(files, code, ended_s, hung=hung)
            asked = report is not None and report.cause is FailureCause.STOPPED
            if report is not None and not (asked and files.result.exists()):
                reports.append(report)
        return reports + self._left_early(reports)

    def _left_early(self, reports: Sequence[FailureReport]) -> list[FailureReport]:
        """Return reports on workers that returned while a failed one needed them."""
        reported = {report.rank for report in reports}
        needed = {report.waits_for_rank for report in reports}
        return [
            silent_failure_report(
                files, 0, self.workers.ended_s[files.rank], hung=False
            )
            for files in self.files()
            if files.rank in needed - reported and files.rank in self.workers.ended_s
        ]

    def _would_fail_again(self) -> bool:
        """Return whether another attempt would fail alike; log its start if not."""
        first = first_failures(self._reports())[0]
        if first.cause is FailureCause.RAISED and first.code in _DETERMINED:
            return True
        log.warning(
            "%s; starting the workers again, %d of %d",
            failure_headline(first),
            self.number + 1,
            self.max_restarts,
        )
        return False


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise `_StoppedBySignal` on a signal; does nothing outside of the main thread."""

    def stop(number: int, frame: object) -> NoReturn:
        raise _StoppedBySignal(number)

    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                stack.enter_context(signal_handler(number, stop))
        yield


def _refuse_inside_a_worker() -> None:
    if env.JOB_DIR.is_set or env.RANK.is_set:
        raise RunError(
            "hocket.launch was called inside a worker. A script that calls it needs "
            'the guard `if __name__ == "__main__":` around the call; under torchrun, '
            "call the function itself"
        )


def _stopped(number: signal.Signals, positions: str) -> BaseException:
    """Return the error after a signal, with where the workers stood."""
    message = f"stopped by {number.name}: {positions or 'no worker had begun'}"
    if number is signal.SIGINT:
        return KeyboardInterrupt(message)
    log.warning("%s", message)
    return SystemExit(128 + number)
