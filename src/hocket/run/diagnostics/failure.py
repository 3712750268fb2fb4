"""The report of one worker's failure, written by the worker or by its launcher."""

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
from hocket.errors import HocketError, RunError, WaitError
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
    own = [i for i, frame in enumerate(frames) if _is_users(frame.filename)]
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


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_LIBRARIES))


def _lines(frame: traceback.FrameSummary) -> list[str]:
    place = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    return [place, f"    {frame.line}"] if frame.line else [place]
