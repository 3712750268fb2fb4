"""Finds the failure that caused the others among the workers' reports.

One failing worker makes others fail. A report written because a peer was gone, or
because the launcher ended the job, is a consequence, whenever it was written:

    rank 1 was killed by signal 9 (SIGKILL) at step 12 in 1B3
    after that:
      rank 0 gave up at step 12 in 0B3, waiting for dx from rank 1: ...
    the last ops of rank 1, newest last:
      step    12  1F3          took 1.204 ms
      step    12  1B3          began 0.021 s before
    all reports: run/workers/job-1/attempt-0

A message has 25 lines at most, but for those of an error's own text.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final, assert_never

from hocket.env import ExitCode
from hocket.errors import WorkerError
from hocket.run.diagnostics.failure import (
    FailureCause,
    FailureReport,
    ops_table,
    stopped_at,
)
from hocket.run.diagnostics.flight_recorder import NO_RANK, OpState

NUM_OPS: Final = 6  # of the first failure, in the message; the reports hold all
NUM_OTHERS: Final = 8  # workers that failed after it, one line each


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
    lines = [*failure_lines(ordered[0])]
    if others := ordered[1:]:
        shown = [f"  {first_line(report)}" for report in others[:NUM_OTHERS]]
        lines += ["after that:", *shown]
        if (num_more := len(others) - NUM_OTHERS) > 0:
            lines += [f"  and {num_more} more"]
    lines += last_ops(ordered[0])
    lines.append(f"all reports: {folder}")
    return WorkerError("\n".join(lines), ordered[0].rank, _exit_code(ordered))


def failure_lines(report: FailureReport) -> list[str]:
    """Describe a worker's end: one sentence, the usual reason, the user's own lines."""
    lines = [failure_headline(report), *_hint(report)]
    if report.user_lines:
        return [*lines, *report.user_lines]
    if report.kind:
        return lines
    stacks = report.traceback.splitlines()  # of a crash: faulthandler's
    return [*lines, *(f"  {line}" for line in stacks[:NUM_OPS])]


def first_line(report: FailureReport) -> str:
    """Describe a worker's end in one line."""
    return failure_headline(report).splitlines()[0]


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
