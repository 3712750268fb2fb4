"""What happened to a job, from its workers' reports: the first failure on top.

Workers fail one because of another. A report written because a neighbour was gone, or
because the launcher asked for an end, is a consequence, whenever it was written:

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
from hocket.run.diagnostics.failure import Cause, Report, table, where
from hocket.run.diagnostics.flight_recorder import NOBODY, State

NUM_OPS: Final = 6  # of each worker, in the message; the reports hold all
NUM_WORKERS: Final = 4  # whose last ops are in the message


def first_failures(reports: Sequence[Report]) -> list[Report]:
    """The reports in the order in which the failures caused each other.

    The clock decides only among equals: 1. what failed by itself; 2. who hung, or was
    busy with something else while another waited in vain; it shows late, by what the
    other reports; 3. who gave up waiting, or was asked to stop.
    """
    awaited = _awaited(reports)

    def order(report: Report) -> int:
        match report.cause:
            case Cause.RAISED | Cause.KILLED | Cause.EXITED:
                return 1
            case Cause.HUNG:
                return 2
            case Cause.STOPPED:
                waits = report.waits_for_rank != NOBODY
                return 3 if waits or report.rank not in awaited else 2
            case Cause.WAITED:
                return 3
            case _:
                assert_never(report.cause)

    return sorted(reports, key=lambda r: (order(r), r.time_s, r.rank))


def _awaited(reports: Sequence[Report]) -> set[int]:
    """For whom somebody waited in vain; nobody, if none gave up waiting.

    Who gave up may have waited for several at once, and not know for whom; those that
    were stopped while they waited know more.
    """
    if all(r.cause is not Cause.WAITED for r in reports):
        return set()
    return {
        r.waits_for_rank for r in reports if r.cause in {Cause.WAITED, Cause.STOPPED}
    }


def worker_error(reports: Sequence[Report], folder: Path) -> WorkerError:
    """The error that the launching process raises.

    Args:
        reports: of all workers that failed; at least one.
        folder: where the reports are kept.
    """
    ordered = first_failures(reports)
    lines = [headline(ordered[0]), *_hint(ordered[0]), *_own_traceback(ordered[0])]
    if len(ordered) > 1:
        lines += ["after that:", *(f"  {headline(r)}" for r in ordered[1:])]
    for report in ordered[:NUM_WORKERS]:
        lines += last_ops(report)
    lines.append(f"all reports: {folder}")
    return WorkerError("\n".join(lines), ordered[0].rank, _exit_code(ordered))


def headline(report: Report) -> str:
    """One worker's end in one sentence: rank, what, step and op."""
    place = where(report.last)
    rank = f"rank {report.rank}"
    match report.cause:
        case Cause.RAISED:
            return f"{rank} raised {report.kind} {place}: {report.message}"
        case Cause.KILLED:
            by = _signal(-report.code)
            return f"{rank} was killed by {by} {place}{_waits(report)}"
        case Cause.EXITED:
            return f"{rank} ended with exit code {report.code} {place}{_waits(report)}"
        case Cause.HUNG:
            return f"{rank} hung {place}{_waits(report)}{_since(report)}"
        case Cause.WAITED:
            why = f"{report.kind}: {report.message}"
            return f"{rank} gave up {place}{_waits(report)}: {why}"
        case Cause.STOPPED:
            return f"{rank} was stopped {place}{_waits(report)}{_since(report)}"
        case _:
            assert_never(report.cause)


def last_ops(report: Report) -> list[str]:
    """The newest ops of one worker, as lines of text."""
    lines = table(report.last_ops[-NUM_OPS:], report.monotonic_s)
    if not lines:
        return []
    title = f"the last ops of rank {report.rank}, newest last:"
    return [title, *(f"  {line}" for line in lines)]


def _waits(report: Report) -> str:
    last = report.last
    if last is None or last.state is not State.WAITING:
        return ""
    whom = f" from rank {last.from_rank}" if last.from_rank != NOBODY else ""
    return f", waiting for {last.waits_for}{whom}"


def _since(report: Report) -> str:
    """For how long a worker had been where it was found."""
    if report.last is None:
        return ""
    return f" (for {report.monotonic_s - report.last.changed_s:.1f} s)"


def _signal(number: int) -> str:
    """A signal by number and name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _hint(report: Report) -> list[str]:
    """The usual reason, where there is one."""
    if report.code == -signal.SIGKILL and report.cause is Cause.KILLED:
        return ["if nobody sent that signal, the machine ran out of memory: see dmesg"]
    return []


def _own_traceback(report: Report) -> list[str]:
    """Where an error came from that hocket did not raise on purpose."""
    if hasattr(hocket.errors, report.kind):
        return []
    return [f"  {line}" for line in report.traceback.splitlines()]


def _exit_code(ordered: Sequence[Report]) -> int:
    """What the launching process should end with."""
    first, *others = ordered
    gave_up = (r for r in others if r.cause is Cause.WAITED)
    if first.cause is Cause.STOPPED and any(r.time_s < first.time_s for r in gave_up):
        return ExitCode.HANG
    if first.cause in {Cause.HUNG, Cause.WAITED}:
        return ExitCode.HANG
    return first.code if first.cause is Cause.RAISED else ExitCode.WORKER
