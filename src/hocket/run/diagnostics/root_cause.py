"""Finds the failure that caused the others among the workers' reports.

One failing worker makes others fail. A report written because a peer was gone, or
because the launcher ended the job, is a consequence, whenever it was written:

    rank 1 was killed by signal 9 (SIGKILL) at step 12 in 1B3
    after that:
      rank 0 gave up at step 12 in 0B3, waiting for dx from rank 1: ...
    the last ops of rank 0, newest last:
      step    12  0F3          took 1.204 ms
      step    12  0B3          waiting 5.001 s for dx from rank 1
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final, assert_never

import hocket.errors
from hocket.env import ExitCode
from hocket.errors import WorkerError
from hocket.run.diagnostics.failure import (
    FailureCause,
    FailureReport,
    ops_table,
    stopped_at,
)
from hocket.run.diagnostics.flight_recorder import NO_RANK, OpState

NUM_OPS: Final = 6  # of each worker, in the message; the reports hold all
NUM_WORKERS: Final = 4  # whose last ops are in the message


def first_failures(reports: Sequence[FailureReport]) -> list[FailureReport]:
    """Sort reports such that causes come before consequences.

    Time decides only within each class: 1. workers that failed by themselves; 2.
    workers that hung, or were busy while another's wait for them timed out; 3. workers
    that gave up waiting, or were asked to stop.
    """
    awaited = _awaited(reports)

    def order(report: FailureReport) -> int:
        match report.cause:
            case FailureCause.RAISED | FailureCause.KILLED | FailureCause.EXITED:
                return 1
            case FailureCause.HUNG:
                return 2
            case FailureCause.STOPPED:
                waits = report.waits_for_rank != NO_RANK
                return 3 if waits or report.rank not in awaited else 2
            case FailureCause.WAITED:
                return 3
            case _:
                assert_never(report.cause)

    return sorted(reports, key=lambda r: (order(r), r.time_s, r.rank))


def _awaited(reports: Sequence[FailureReport]) -> set[int]:
    """Return the ranks for which other workers waited until they failed.

    A worker that gave up may have waited for several ranks at once and not know which
    one failed; those that were stopped while they waited know more.
    """
    if all(r.cause is not FailureCause.WAITED for r in reports):
        return set()
    return {
        r.waits_for_rank
        for r in reports
        if r.cause in {FailureCause.WAITED, FailureCause.STOPPED}
    }


def worker_error(reports: Sequence[FailureReport], folder: Path) -> WorkerError:
    """Return the error that the launching process raises.

    Args:
        reports: the reports of all workers that failed; at least one.
        folder: the folder that holds the reports.
    """
    ordered = first_failures(reports)
    lines = [
        failure_headline(ordered[0]),
        *_hint(ordered[0]),
        *_own_traceback(ordered[0]),
    ]
    if len(ordered) > 1:
        lines += ["after that:", *(f"  {failure_headline(r)}" for r in ordered[1:])]
    for report in ordered[:NUM_WORKERS]:
        lines += last_ops(report)
    lines.append(f"all reports: {folder}")
    return WorkerError("\n".join(lines), ordered[0].rank, _exit_code(ordered))


def failure_headline(report: FailureReport) -> str:
    """Describe a worker's end in one sentence: rank, cause, step and op."""
    place = stopped_at(report.last)
    rank = f"rank {report.rank}"
    match report.cause:
        case FailureCause.RAISED:
            return f"{rank} raised {report.kind} {place}: {report.message}"
        case FailureCause.KILLED:
            by = _signal(-report.code)
            return f"{rank} was killed by {by} {place}{_waits(report)}"
        case FailureCause.EXITED:
            return f"{rank} ended with exit code {report.code} {place}{_waits(report)}"
        case FailureCause.HUNG:
            return f"{rank} hung {place}{_waits(report)}{_since(report)}"
        case FailureCause.WAITED:
            why = f"{report.kind}: {report.message}"
            return f"{rank} gave up {place}{_waits(report)}: {why}"
        case FailureCause.STOPPED:
            return f"{rank} was stopped {place}{_waits(report)}{_since(report)}"
        case _:
            assert_never(report.cause)


def last_ops(report: FailureReport) -> list[str]:
    """Format the newest ops of one worker as lines of text."""
    lines = ops_table(report.last_ops[-NUM_OPS:], report.monotonic_s)
    if not lines:
        return []
    title = f"the last ops of rank {report.rank}, newest last:"
    return [title, *(f"  {line}" for line in lines)]


def _waits(report: FailureReport) -> str:
    last = report.last
    if last is None or last.state is not OpState.WAITING:
        return ""
    source = f" from rank {last.from_rank}" if last.from_rank != NO_RANK else ""
    return f", waiting for {last.waits_for}{source}"


def _since(report: FailureReport) -> str:
    """Return for how long a worker had been in its last state."""
    if report.last is None:
        return ""
    return f" (for {report.monotonic_s - report.last.changed_s:.1f} s)"


def _signal(number: int) -> str:
    """Return a signal's number and name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _hint(report: FailureReport) -> list[str]:
    """Return the usual reason for such a failure, if there is one."""
    if report.code == -signal.SIGKILL and report.cause is FailureCause.KILLED:
        return ["if no user sent that signal, the machine ran out of memory: see dmesg"]
    return []


def _own_traceback(report: FailureReport) -> list[str]:
    """Return the origin of an error that hocket did not raise on purpose."""
    if hasattr(hocket.errors, report.kind):
        return []
    return [f"  {line}" for line in report.traceback.splitlines()]


def _exit_code(ordered: Sequence[FailureReport]) -> int:
    """Return the exit code for the launching process."""
    first, *others = ordered
    gave_up = (r for r in others if r.cause is FailureCause.WAITED)
    if first.cause is FailureCause.STOPPED and any(
        r.time_s < first.time_s for r in gave_up
    ):
        return ExitCode.HANG
    if first.cause in {FailureCause.HUNG, FailureCause.WAITED}:
        return ExitCode.HANG
    return first.code if first.cause is FailureCause.RAISED else ExitCode.WORKER
