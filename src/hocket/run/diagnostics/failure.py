"""The report of one worker's failure, and the one that caused the others among several.

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

import logging
import os
import signal
import site
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final, assert_never

from hocket import env
from hocket.env import ExitCode
from hocket.errors import HocketError, RunError, WaitError, WorkerError
from hocket.run.diagnostics.flight_recorder import (
    NO_RANK,
    STARTING,
    OpState,
    RecordedOp,
    read_flight_recorder,
)
from hocket.run.diagnostics.job_folder import WorkerFiles, write_json

log = logging.getLogger(__name__)

_HOCKET: Final = str(Path(__file__).parents[2]) + os.sep
_FOLDERS: Final = (
    str(Path(os.__file__).parent),  # the standard library
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_LIBRARIES: Final = (_HOCKET, *(folder + os.sep for folder in _FOLDERS))

MAX_BYTES: Final = 4 * 2**20  # of a report; a longer one is not ours


# gloo reports a lost or silent peer only in the text of its errors.
_LOST: Final = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting")


class FailureCause(Enum):
    """The cause of a worker's end."""

    RAISED = "raised"  # an exception of its own
    KILLED = "killed"  # a signal that it could not answer
    EXITED = "exited"  # it ended without a report
    HUNG = "hung"  # it did not answer, and the launcher ended it
    WAITED = "waited"  # another worker did not send what it waited for
    STOPPED = "stopped"  # it was asked to stop


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The report of one worker's end.

    Args:
        rank: the worker's rank.
        host: the name of its host.
        pid: its process id; 0 if unknown.
        cause: the cause of its end.
        code: its exit code; minus the signal's number if a signal killed it.
        time_s: when it ended, in seconds since 1970.
        monotonic_s: the same moment on the clock of `last_ops`.
        kind: the exception's type, empty if there was none.
        message: the exception's message.
        traceback: the exception's traceback; after a crash, the stacks of all threads.
        user_lines: the user's own lines in the traceback.
        last_ops: the newest ops, oldest first.
    """

    rank: int
    host: str
    pid: int
    cause: FailureCause
    code: int
    time_s: float
    monotonic_s: float
    kind: str = ""
    message: str = ""
    traceback: str = ""
    user_lines: tuple[str, ...] = ()
    last_ops: tuple[RecordedOp, ...] = ()

    @property
    def last(self) -> RecordedOp | None:
        """The newest op; None if the worker began none."""
        return self.last_ops[-1] if self.last_ops else None

    @property
    def waits_for_rank(self) -> int:
        """The rank that it was waiting for; `NO_RANK` if it was not waiting."""
        if self.last is None or self.last.state is not OpState.WAITING:
            return NO_RANK
        return self.last.from_rank


def failure_report(
    rank: int, entries: tuple[RecordedOp, ...], error: BaseException
) -> FailureReport:
    """Return the report that a worker writes when an exception ends it."""
    return FailureReport(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        cause=_cause_of(error, entries),
        code=code_of(error),
        time_s=time.time(),
        monotonic_s=time.monotonic(),
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        user_lines=tuple(user_lines(error)),
        last_ops=entries,
    )


def silent_failure_report(
    files: WorkerFiles, code: int, time_s: float, *, hung: bool
) -> FailureReport:
    """Return the launcher's report on a worker that left none.

    Args:
        files: the worker's files.
        code: its exit code.
        time_s: when it ended, in seconds since 1970.
        hung: whether the launcher ended it because it did not answer.
    """
    snapshot = read_flight_recorder(files.recorder)
    faults = files.faults.read_text() if files.faults.exists() else ""
    if hung:
        cause = FailureCause.HUNG
    elif code in {-signal.SIGTERM, -signal.SIGINT}:
        cause = FailureCause.STOPPED
    else:
        cause = FailureCause.KILLED if code < 0 else FailureCause.EXITED
    return FailureReport(
        rank=files.rank,
        host=socket.gethostname(),
        pid=snapshot.pid if snapshot else 0,
        cause=cause,
        code=code,
        time_s=time_s,
        monotonic_s=time.monotonic() - (time.time() - time_s),
        traceback=faults,
        last_ops=snapshot.entries if snapshot else (),
    )


def code_of(error: BaseException) -> int:
    """Return the exit code of a process that this exception ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    return env.exit_code_of(error)


def write_report(path: Path, report: FailureReport) -> None:
    """Write a report as JSON, the whole file or none of it.

    Where it cannot be written, as on a full disk, it is logged with its own cause.
    """
    try:
        write_json(path, as_json(report))
    except RunError as error:
        log.warning("rank %d: %s", report.rank, error)
        with suppress(OSError):
            path.touch()  # so that it is not tried again


def as_json(report: FailureReport) -> dict[str, object]:
    """Return a report as JSON can hold it."""
    return asdict(report) | {"cause": report.cause.value}


def read_report(path: Path) -> FailureReport | None:
    """Read a report; None if there is no file, or it is not a report."""
    import pydantic  # takes a while to import, and is needed only here

    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        return pydantic.TypeAdapter(FailureReport).validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError):
        return None


def _cause_of(error: BaseException, entries: tuple[RecordedOp, ...]) -> FailureCause:
    """Return whether a worker failed by itself, or because of another."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        asked = code_of(error) in {env.ExitCode.INTERRUPTED, env.ExitCode.TERMINATED}
        return FailureCause.STOPPED if asked else FailureCause.EXITED
    if isinstance(error, HocketError):
        return (
            FailureCause.WAITED if isinstance(error, WaitError) else FailureCause.RAISED
        )
    waits = bool(entries) and entries[-1].state is OpState.WAITING
    lost = isinstance(error, RuntimeError) and any(t in str(error) for t in _LOST)
    return FailureCause.WAITED if waits or lost else FailureCause.RAISED


def stopped_at(entry: RecordedOp | None) -> str:
    """Return where a worker stood, such as `at step 12 in 0B3`."""
    if entry is None or entry.step == STARTING:
        return "before its first op"
    place = f"{'after' if entry.state is OpState.ENDED else 'in'} {entry.op}"
    return f"at step {entry.step} {place}"


def ops_table(entries: tuple[RecordedOp, ...], now_s: float) -> list[str]:
    """Format ops as lines of text, oldest first."""
    return [
        f"step {entry.step:>5}  {entry.op:<12} {_progress(entry, now_s)}"
        for entry in entries
        if entry.step != STARTING
    ]


def _progress(entry: RecordedOp, now_s: float) -> str:
    """Describe how far an op came, and what it waited for."""
    what = entry.waits_for
    if what and entry.from_rank != NO_RANK:
        what += f" from rank {entry.from_rank}"
    match entry.state:
        case OpState.BEGUN:
            began = f"began {now_s - entry.begun_s:.3f} s before"
            return f"{began}, waited for {what}" if what else began
        case OpState.WAITING:
            return f"waiting {now_s - entry.changed_s:.3f} s for {what}"
        case OpState.ENDED:
            took = f"took {(entry.changed_s - entry.begun_s) * 1e3:.3f} ms"
            return f"{took}, waited for {what}" if what else took
        case _:
            assert_never(entry.state)


def user_lines(error: BaseException) -> list[str]:
    """Return the innermost line of the user's code, and the one that called hocket.

    Args:
        error: an error that is being handled, so that its callers still run.

    Returns:
        Two lines of text for each, as in a traceback; of an error without a line of the
        user's, the innermost one.
    """
    return lines_of(_frames(error))


def lines_of(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """Return these lines (see `user_lines`).

    Args:
        frames: the outermost first.
    """
    others = "<frozen", "<string>", *_LIBRARIES
    own = [i for i, x in enumerate(frames) if not x.filename.startswith(others)]
    if not own:
        return [line for frame in frames[-1:] for line in _lines(frame)]
    calls = [i for i in own[:-1] if frames[i + 1].filename.startswith(_HOCKET)]
    shown = [own[-1], *calls[-1:]]
    return [line for i in shown for line in _lines(frames[i])]


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error and its causes, behind those of their callers."""
    found: list[traceback.FrameSummary] = []
    trace = error.__traceback__
    if trace is not None:
        above = traceback.walk_stack(trace.tb_frame.f_back)
        found += reversed(traceback.StackSummary.extract(above))
    one: BaseException | None = error
    seen: set[int] = set()  # `raise error from error` is a circle
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        found += traceback.extract_tb(one.__traceback__)
        one = one.__cause__
    return found


def _lines(frame: traceback.FrameSummary) -> list[str]:
    place = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    return [place, f"    {frame.line}"] if frame.line else [place]


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
