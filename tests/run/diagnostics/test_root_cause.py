"""Which failure is named first, and how."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from hocket.env import ExitCode
from hocket.errors import HocketError, WaitError
from hocket.run.diagnostics.failure import (
    FailureCause,
    FailureReport,
    failure_headline,
    failure_report,
    first_failures,
    read_report,
    worker_error,
    write_report,
)
from hocket.run.diagnostics.flight_recorder import (
    NO_RANK,
    FlightRecorder,
    OpState,
    RecordedOp,
)


def report(
    rank: int,
    cause: FailureCause,
    time_s: float,
    waits_for: int = NO_RANK,
    code: int = 7,
) -> FailureReport:
    """A worker that ended in step 12, perhaps waiting for another."""
    state = OpState.BEGUN if waits_for == NO_RANK else OpState.WAITING
    what = "" if waits_for == NO_RANK else "dx"
    entry = RecordedOp(12, f"{rank}B3", state, 1.0, 2.0, what, waits_for)
    return FailureReport(
        rank=rank,
        host="here",
        pid=1,
        cause=cause,
        code=code,
        time_s=time_s,
        monotonic_s=4.5,
        kind="ValueError",
        message="no",
        last_ops=(entry,),
    )


KILLED = report(3, FailureCause.KILLED, 9.0, code=-signal.SIGKILL)
HUNG = report(2, FailureCause.HUNG, 9.9)
GAVE_UP = report(1, FailureCause.WAITED, 5.0, waits_for=2, code=6)
STOPPED = report(0, FailureCause.STOPPED, 4.0, waits_for=1, code=143)
BUSY = report(2, FailureCause.STOPPED, 9.5, code=143)
# Waited for several at once, so it cannot say for whom.
GAVE_UP_ON_ALL = report(3, FailureCause.WAITED, 3.0, code=6)
STOPPED_FOR_BUSY = report(0, FailureCause.STOPPED, 4.0, waits_for=2, code=143)


@pytest.mark.parametrize(
    ("reports", "first", "code"),
    [
        ([STOPPED, GAVE_UP, KILLED], KILLED, ExitCode.WORKER),
        ([STOPPED, GAVE_UP, HUNG], HUNG, ExitCode.HANG),
        ([STOPPED, GAVE_UP, HUNG, KILLED], KILLED, ExitCode.WORKER),
        ([STOPPED, GAVE_UP, BUSY], BUSY, ExitCode.HANG),
        ([STOPPED_FOR_BUSY, GAVE_UP_ON_ALL, BUSY], BUSY, ExitCode.HANG),
        ([BUSY, STOPPED], STOPPED, ExitCode.WORKER),
        ([GAVE_UP, report(0, FailureCause.WAITED, 4.0, 1)], None, ExitCode.HANG),
        (
            [report(0, FailureCause.RAISED, 8.0, code=5), KILLED],
            None,
            ExitCode.NON_FINITE,
        ),
    ],
)
def test_causes_come_before_consequences(
    reports: list[FailureReport], first: FailureReport | None, code: ExitCode
) -> None:
    """Whenever each was written, and in whichever order they are read."""
    first = first or min(reports, key=lambda r: r.time_s)
    for order in itertools.permutations(reports):
        assert first_failures(order)[0] is first
        error = worker_error(order, Path("run"))
        assert (error.rank, error.exit_code) == (first.rank, code)
        assert str(error).startswith(f"rank {first.rank} ")


@pytest.mark.parametrize(
    ("who", "reported"),
    [
        (KILLED, "rank 3 was killed by signal 9 (SIGKILL) at step 12 in 3B3"),
        (HUNG, "rank 2 hung at step 12 in 2B3 (for 2.5 s)"),
        (
            GAVE_UP,
            "rank 1 gave up at step 12 in 1B3, waiting for dx from rank 2: "
            "ValueError: no",
        ),
        (
            STOPPED,
            "rank 0 was stopped at step 12 in 0B3, waiting for dx from rank 1 "
            "(for 2.5 s)",
        ),
    ],
)
def test_a_headline_names_rank_step_and_op(who: FailureReport, reported: str) -> None:
    """And for whom it waited."""
    assert failure_headline(who) == reported


def test_sigkill_comes_with_its_usual_reason() -> None:
    """Most who meet it have not sent it."""
    assert "ran out of memory" in str(worker_error([KILLED], Path("run")))


@pytest.mark.parametrize(
    ("error", "waiting", "cause"),
    [
        (ValueError("no"), False, FailureCause.RAISED),
        (WaitError("no"), False, FailureCause.WAITED),
        (HocketError("no"), True, FailureCause.RAISED),
        (RuntimeError("Connection closed by peer"), False, FailureCause.WAITED),
        (RuntimeError("whatever torch says"), True, FailureCause.WAITED),
        (RuntimeError("whatever torch says"), False, FailureCause.RAISED),
        (KeyboardInterrupt(), True, FailureCause.STOPPED),
        (SystemExit(143), False, FailureCause.STOPPED),
        (SystemExit("no"), False, FailureCause.EXITED),
    ],
)
def test_a_worker_knows_why_it_ends(
    error: BaseException, waiting: bool, cause: FailureCause
) -> None:
    """By itself, because of another, or because it was asked to."""
    recorder = FlightRecorder()
    recorder.begin("0B3", 12)
    if waiting:
        recorder.wait("dx", 1)
    assert failure_report(0, recorder.entries(), error).cause is cause


def test_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    """With the last ops and the traceback."""
    path = tmp_path / "report.json"
    with pytest.raises(ValueError, match="no") as caught:
        int("no")
    written = failure_report(3, GAVE_UP.last_ops, caught.value)
    write_report(path, written)
    assert read_report(path) == written
    assert 'int("no")' in written.traceback


@pytest.mark.parametrize("text", ["", "[]", '{"rank": 0}', "{" * 10_000])
def test_what_is_no_report_is_none(tmp_path: Path, text: str) -> None:
    """The root cause is named even if a file in the folder is broken."""
    path = tmp_path / "report.json"
    assert read_report(path) is None
    path.write_text(text)
    assert read_report(path) is None
