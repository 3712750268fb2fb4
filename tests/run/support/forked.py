"""Jobs of real workers that begin at once, forked from a process that has loaded torch.

`hocket.launch` starts a Python per worker, which takes seconds, most of them for
imports. Here workers begin with the same first lines (run/cluster/start.py), but none
watches over them: when one fails, the others must find out, and end, by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from hocket import env
from hocket.run.cluster.start import WorkerStart, main
from hocket.run.diagnostics.failure import (
    FailureReport,
    read_report,
    silent_failure_report,
)
from hocket.run.diagnostics.job_folder import WorkerFiles, attempt_dir
from tests.run.support.fork_server import fork_server

FAULT: Final = "fault"  # the file into which a worker with a fault writes its rank
WHOLE_S: Final = 60.0  # for a job without a fault, on a busy machine
CALM_TIMEOUT_S: Final = 30.0  # for a wait in such a job
LAST_S: Final = 0.5  # for the worker that had the fault, when all others have ended


def full_entry(entry: str) -> str:
    """Return `module:function` with the whole path of a module of this folder.

    Args:
        entry: a module without a dot is one of tests/run/support.
    """
    return entry if "." in entry else f"{__package__}.{entry}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the workers of a job ended; everything by rank.

    Args:
        codes: exit codes; minus the signal's number if a signal killed it.
        after_s: how long after the fault it ended.
        hung: those that had to be killed.
        reports: of those that did not end well.
        results: of those that did.
        output: what it wrote to stdout and stderr.
    """

    codes: dict[int, int]
    after_s: dict[int, float]
    hung: set[int]
    reports: dict[int, FailureReport]
    results: dict[int, Any]
    output: dict[int, str]


def mark_fault(folder: Path, rank: int) -> None:
    """Say in the folder of the test which worker is about to have a fault.

    The test reads it whole or not at all: a file is there before it is written.
    """
    written = folder / f"{FAULT}.part"
    written.write_text(str(rank))
    written.rename(folder / FAULT)


def run_forked(
    entry: str,
    *args: Any,
    num_workers: int = 2,
    folder: Path,
    timeout_s: float,
    limit_s: float = WHOLE_S,
    whole_s: float = WHOLE_S,
    context: BaseContext | None = None,
) -> Outcome:
    """Run a function in workers, and wait until all have ended.

    Args:
        entry: `module:function`; see `full_entry`.
        args: of the function, as JSON.
        num_workers: to start.
        folder: of the test; one job each.
        timeout_s: what workers wait for each other.
        limit_s: after a fault, those that are left so much later are killed.
        whole_s: without a fault, after this.
        context: starts them; the fork server, when not given.
    """
    workers = start_forked(
        entry,
        *args,
        num_workers=num_workers,
        folder=folder,
        timeout_s=timeout_s,
        context=context,
    )
    try:
        ended_s = _wait(workers, folder / FAULT, limit_s, whole_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return _outcome([worker.exitcode or 0 for worker in workers], ended_s, folder)


def start_forked(
    entry: str,
    *args: Any,
    num_workers: int,
    folder: Path,
    timeout_s: float,
    context: BaseContext | None = None,
) -> list[BaseProcess]:
    """Start workers that run a function, and return at once.

    Args:
        entry: `module:function`; see `full_entry`.
        args: of the function, as JSON.
        num_workers: to start.
        folder: of the job.
        timeout_s: what workers wait for each other.
        context: starts them; the fork server, when not given.
    """
    begin = fork_server() if context is None else context
    workers: list[BaseProcess] = [
        begin.Process(  # type: ignore[attr-defined]  # each context has its own
            target=_enter,
            args=(rank, num_workers, folder, full_entry(entry), args, timeout_s),
        )
        for rank in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    return workers


def answers_of(
    entry: str,
    *args: Any,
    num_workers: int = 2,
    folder: Path,
    timeout_s: float = CALM_TIMEOUT_S,
    whole_s: float = WHOLE_S,
    context: BaseContext | None = None,
) -> list[Any]:
    """What each worker of a job returns in which nothing goes wrong, by rank.

    Args:
        entry: `module:function`; see `full_entry`.
        args: of the function, as JSON.
        num_workers: to start.
        folder: of the job; made where it is missing.
        timeout_s: what workers wait for each other.
        whole_s: that all of it may take.
        context: starts them; the fork server, when not given.
    """
    folder.mkdir(exist_ok=True)
    outcome = run_forked(
        entry,
        *args,
        num_workers=num_workers,
        folder=folder,
        timeout_s=timeout_s,
        whole_s=whole_s,
        context=context,
    )
    reported = {rank: f"{x.kind}: {x.message}" for rank, x in outcome.reports.items()}
    assert not reported, (reported, outcome.output)
    return [outcome.results[rank] for rank in range(num_workers)]


def _wait(
    workers: Sequence[BaseProcess], fault: Path, limit_s: float, whole_s: float
) -> dict[int, float]:
    """When each ended, in seconds since 1970."""
    ended_s: dict[int, float] = {}
    ranks: dict[Any, int] = {worker.sentinel: r for r, worker in enumerate(workers)}
    deadline_s = time.time() + whole_s
    while ranks and time.time() < deadline_s:
        for sentinel in wait(list(ranks), 0.1):
            ended_s[ranks.pop(sentinel)] = time.time()
        if fault.exists():
            deadline_s = fault.stat().st_mtime + limit_s
            if list(ranks.values()) == [int(fault.read_text())]:
                deadline_s = min(deadline_s, max(ended_s.values(), default=0) + LAST_S)
    return ended_s


def _outcome(codes: list[int], ended_s: dict[int, float], folder: Path) -> Outcome:
    fault = folder / FAULT
    fault_s = fault.stat().st_mtime if fault.exists() else 0.0
    files = [WorkerFiles(_attempt(folder), rank) for rank in range(len(codes))]
    reports, results = {}, {}
    for rank, code in enumerate(codes):
        if code:
            hung = rank not in ended_s
            silent = silent_failure_report(files[rank], code, time.time(), hung=hung)
            reports[rank] = read_report(files[rank].report) or silent
        else:
            results[rank] = json.loads(files[rank].result.read_text())
    return Outcome(
        dict(enumerate(codes)),
        {rank: end_s - fault_s for rank, end_s in ended_s.items()},
        set(range(len(codes))) - set(ended_s),
        reports,
        results,
        {rank: _output(folder, rank).read_text() for rank in range(len(codes))},
    )


def _attempt(folder: Path) -> Path:
    return attempt_dir(folder / "job", 0)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"


def _enter(
    rank: int,
    num_workers: int,
    folder: Path,
    entry: str,
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    """The worker's own part: become what the launcher would have started."""
    os.setsid()
    output = os.open(_output(folder, rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {
        env.RANK.name: str(rank),
        env.WORLD_SIZE.name: str(num_workers),
        env.LOCAL_RANK.name: str(rank),
        env.LOCAL_WORLD_SIZE.name: str(num_workers),
        env.JOB_DIR.name: str(folder / "job"),
        env.LAUNCHER_PID.name: str(os.getppid()),
        env.TIMEOUT_S.name: repr(timeout_s),
    }
    main(WorkerStart(entry=entry, args=list(args), sys_path=[], argv=[]))
