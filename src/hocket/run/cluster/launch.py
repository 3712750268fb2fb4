"""Starts the workers of one machine, waits for them, and reports their failures.

Torch's elastic launcher does the starting, the watching and the restarts
(run/cluster/agent.py); the workers find each other in a file. Nothing listens but the
workers' own gloo and NCCL, on the loopback.

    launch ──▶ elastic agent ──▶ python -c ... job.json   (rank 0)  ─┐
        │                   └──▶ python -c ... job.json   (rank 1)  ─┤ rings, reports
        │                                                            ▼
        └── WorkerWatch ◀───────── <run>/workers/job-.../attempt-0/
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from hocket import env
from hocket.env import ExitCode
from hocket.errors import RunError, WorkerError
from hocket.run.cluster.agent import agent_config, restored_launcher_globals
from hocket.run.cluster.start import PROGRAM, Job
from hocket.run.cluster.watch import GRACE_S, WorkerWatch
from hocket.run.diagnostics.failure import (
    FailureCause,
    FailureReport,
    as_json,
    read_report,
    silent_failure_report,
    stopped_at,
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
from hocket.run.diagnostics.root_cause import (
    failure_headline,
    first_failures,
    worker_error,
)

log = logging.getLogger(__name__)

# Codes of failures that do not depend on the machine or the hour.
_DETERMINED: Final = frozenset({ExitCode.USAGE, ExitCode.PLAN, ExitCode.NON_FINITE})


class _WouldFailAgainError(Exception):
    """Another attempt would fail in the same way."""


def launch(
    entry: str | Callable[..., Json],
    args: Sequence[Json] = (),
    *,
    num_workers: int,
    run_dir: Path | str,
    timeout_s: float = 60.0,
    max_restarts: int = 0,
) -> list[Any]:
    """Run a function in `num_workers` processes of this machine, and wait for them.

    Each process joins the others with `join_world`. A script that calls this must guard
    the call with `if __name__ == "__main__":`, since its workers import it.

    Args:
        entry: `"module:function"`, or a function that a module or the started script
            defines at its top.
        args: the function's arguments: JSON values only.
        num_workers: processes; unless OMP_NUM_THREADS is set, they share the cores.
        run_dir: the run's folder; after a failure, the workers' reports are in it.
        timeout_s: how long a worker waits for another.
        max_restarts: how often all workers are started again after a failure; not after
            one that would come again: data, a model or a plan that is not valid, a
            loss that is no number.

    Returns:
        What each worker's function returned, by rank.

    Raises:
        WorkerError: a worker failed; the first failure is on top.
        RunError: this process is a worker itself, or the function cannot be imported.
        KeyboardInterrupt: Ctrl-C; the workers have ended.
        SystemExit: another signal asked this process to end; the workers have ended.
    """
    _refuse_inside_a_worker()
    if num_workers < 1:
        raise RunError(f"num_workers={num_workers}: start at least one worker")
    job = Job(
        entry=entry if isinstance(entry, str) else _name_of(entry),
        args=list(args),
        sys_path=[str(Path(path).absolute()) for path in sys.path],
        argv=sys.argv,
    )
    run_dir = Path(run_dir)
    attempts = _Attempts(new_job_dir(run_dir), num_workers, max_restarts, timeout_s)
    (run_dir / "failure.json").unlink(missing_ok=True)
    write_json(attempts.folder / "job.json", job)
    try:
        _start(attempts)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        attempts.end()
        raise attempts.failure(codes, run_dir) from None
    except _WouldFailAgainError:
        raise attempts.failure({}, run_dir) from None
    except SignalException as stopped:
        describe_positions = attempts.positions()
        attempts.end()
        attempts.remove()
        raise _stopped(stopped.sigval, describe_positions) from None
    finally:
        attempts.end()
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
    """

    folder: Path
    num_workers: int
    max_restarts: int
    timeout_s: float
    _watches: list[WorkerWatch] = field(default_factory=list)

    def begin(self, attempt: int) -> dict[str, str]:
        """Make an attempt's folder, watch it, and return its workers' variables."""
        if attempt:
            self.end()
            self._log_restart(attempt)
        watch = WorkerWatch(attempt_dir(self.folder, attempt), self.num_workers)
        self._watches.append(watch)
        watch.start()
        variables = {
            env.JOB_DIR.name: str(self.folder),
            env.LAUNCHER_PID.name: str(os.getpid()),
            env.TIMEOUT_S.name: repr(self.timeout_s),
        }
        if not env.THREADS.is_set:
            num_cores = len(os.sched_getaffinity(0))
            variables[env.THREADS.name] = str(max(1, num_cores // self.num_workers))
        return variables

    def end(self) -> None:
        """Kill the workers that are left."""
        for watch in self._watches[-1:]:
            watch.stop()
            watch.kill()

    def files(self) -> list[WorkerFiles]:
        """Return the files of each worker in the last attempt."""
        folder = self._watches[-1].folder
        return [WorkerFiles(folder, rank) for rank in range(self.num_workers)]

    def positions(self) -> str:
        """Describe where each worker stands, in one line."""
        places = []
        for files in self.files() if self._watches else []:
            snapshot = read_flight_recorder(files.recorder)
            if snapshot is not None and snapshot.entries:
                places.append(f"rank {files.rank} {stopped_at(snapshot.entries[-1])}")
        return ", ".join(places)

    def failure(self, codes: Mapping[int, int], run_dir: Path) -> WorkerError:
        """Return the last attempt's error, also written to `failure.json`."""
        for files in self.files():
            files.result.unlink(missing_ok=True)
            store_path(files.folder).unlink(missing_ok=True)
            if files.faults.exists() and not files.faults.stat().st_size:
                files.faults.unlink()
        reports = self._reports(codes)
        error = worker_error(reports, self.files()[0].folder)
        root_cause = {
            "message": str(error),
            "reports": [as_json(report) for report in first_failures(reports)],
        }
        write_json(run_dir / "failure.json", root_cause)
        return error

    def remove(self) -> None:
        """Remove the job's files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another job's may be there
            self.folder.parent.rmdir()

    def _reports(self, codes: Mapping[int, int]) -> list[FailureReport]:
        """Return each failed worker's report, or what the launcher knows of it."""
        watch = self._watches[-1]
        reports = []
        for files in self.files():
            report = read_report(files.report)
            hung = files.rank in watch.hung
            code = codes.get(files.rank) or watch.codes.get(files.rank, 0)
            if report is None and (hung or code):
                ended_s = watch.ended_s.get(files.rank, time.time())
                report = silent_failure_report(files, code, ended_s, hung=hung)
            if report is not None:
                reports.append(report)
        return reports

    def _log_restart(self, attempt: int) -> None:
        """Log what ended the last attempt, and that another one starts.

        Raises:
            _WouldFailAgainError: the next attempt would end in the same way.
        """
        reports = first_failures(self._reports({}))
        what = (
            failure_headline(reports[0])
            if reports
            else "a worker ended without a report"
        )
        raised = bool(reports) and reports[0].cause is FailureCause.RAISED
        if raised and reports[0].code in _DETERMINED:
            raise _WouldFailAgainError(what)
        log.warning(
            "%s; starting the workers again, %d of %d", what, attempt, self.max_restarts
        )


def _start(attempts: _Attempts) -> None:
    config = agent_config(
        attempts.folder.name,
        attempts.num_workers,
        attempts.max_restarts,
        math.ceil(GRACE_S),
        attempts.begin,
    )
    with restored_launcher_globals():
        elastic_launch(config, sys.executable)(
            "-c", PROGRAM, str(attempts.folder / "job.json")
        )


def _refuse_inside_a_worker() -> None:
    if env.JOB_DIR.is_set or env.RANK.is_set:
        raise RunError(
            "hocket.launch was called inside a worker. A script that calls it needs "
            'the guard `if __name__ == "__main__":` around the call; under torchrun, '
            "call the function itself"
        )


def _name_of(function: Callable[..., Json]) -> str:
    """Return a function's name for workers: `module:name` or `path:name`.

    Raises:
        RunError: a worker cannot import it.
    """
    name = function.__qualname__
    module = function.__module__
    if "<" in name:
        raise RunError(
            f"workers cannot import {name}: define it at the top of a module or script"
        )
    if module != "__main__":
        return f"{module}:{name}"
    main = inspect.getmodule(function)
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return f"{spec.name}:{name}"
    path = getattr(main, "__file__", None)
    if path is None:
        raise RunError(
            f"workers cannot import {name} from an interactive session: put it into a "
            "file"
        )
    return f"{Path(path).absolute()}:{name}"


def _stopped(number: signal.Signals, positions: str) -> BaseException:
    """Return the error after a signal, with where the workers stood."""
    message = f"stopped by {number.name}: {positions or 'no worker had begun'}"
    if number is signal.SIGINT:
        return KeyboardInterrupt(message)
    log.warning("%s", message)
    return SystemExit(128 + number)
