"""Makes sure that a worker that fails leaves a report.

    with report_failures(world, run_dir) as recorder:
        recorder.begin("0F3", step=12)
        ...

Inside, every op is recorded. An exception leaves a report and goes on,
with the last ops as its note. SIGTERM raises `StoppedBySignal`; if the main thread
sits in a call that does not return, a second thread writes the report and ends the
process. A crash below Python leaves its stacks (faulthandler).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from hocket import env
from hocket.run.cluster.stop import StoppedBySignal
from hocket.run.cluster.world import World
from hocket.run.diagnostics.failure import (
    FailureCause,
    FailureReport,
    failure_headline,
    failure_lines,
    failure_report,
    first_line,
    last_ops,
    lines_of,
    stopped_at,
    user_lines,
    write_report,
)
from hocket.run.diagnostics.flight_recorder import (
    NO_RANK,
    FlightRecorder,
    read_flight_recorder,
)
from hocket.run.diagnostics.job_folder import (
    WorkerFiles,
    attempt_dir,
    is_first_failure,
    job_dir,
    write_json,
)
from hocket.run.diagnostics.process_wide import (
    is_free,
    signal_handler,
    signal_wakeup,
    unraisable_hook,
)

GRACE_S: Final = 1.0  # for the main thread to answer a signal
_AGAIN_S: Final = 0.01  # until the callback is over in which a signal came

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_flight_recorder(
    world: World, run_dir: str | Path | None
) -> Iterator[FlightRecorder]:
    """Open this worker's flight recorder; in memory only, if it runs alone."""
    if world.world_size == 1 and run_dir is None:
        yield FlightRecorder()
        return
    with report_failures(world, None if run_dir is None else Path(run_dir)) as recorder:
        yield recorder


@contextlib.contextmanager
def report_failures(world: World, run_dir: Path | None) -> Iterator[FlightRecorder]:
    """Record the worker's ops, and report its end if it fails.

    Args:
        world: this worker's place in the job.
        run_dir: the run's folder; reports go to `workers/` in it. None for a folder
            among temporary files, which the error names.

    Raises:
        BaseException: the block raised it; it carries the last ops as a note.
    """
    files, recorder = _opened(world, run_dir)
    stuck = partial(_report_stuck, world, files, recorder)
    with _fault_handler(files.faults), _stoppable(stuck, alone=world.world_size == 1):
        try:
            yield recorder
        except GeneratorExit:  # forgotten, not failed
            raise
        except BaseException as error:
            report = failure_report(world.rank, recorder.entries(), error)
            if report.code != 0:
                _publish_report(world, report, files, error)
            raise
    if not env.JOB_DIR.is_set:  # else the launcher removes them, all at once
        _remove(files)


def _opened(world: World, run_dir: Path | None) -> tuple[WorkerFiles, FlightRecorder]:
    """Return this worker's files, with a recorder that keeps their folder."""
    job = job_dir(run_dir, world.token)
    for is_last in (False, False, False, True):
        try:
            files = WorkerFiles(attempt_dir(job, world.attempt), world.rank)
            recorder = FlightRecorder.create(files.recorder, os.getpid())
        except FileNotFoundError:  # another worker has removed it while it was empty
            if is_last:
                raise
        else:
            break
    files.report.unlink(missing_ok=True)
    return files, recorder


def _publish_report(
    world: World, report: FailureReport, files: WorkerFiles, error: BaseException
) -> None:
    """Write the report to the folder, the exception, and torchrun's summary."""
    write_report(files.report, report)
    if report.cause is FailureCause.STOPPED:
        world.leave(failure_headline(report))
        _log_report(report)
        return
    title = f"rank {report.rank} failed {stopped_at(report.last)}"
    notes = [title, *_peer_wait(report, files), *last_ops(report)]
    error.add_note("\n".join(notes))
    _write_torchrun_report(report)
    if not env.JOB_DIR.is_set:  # else the launcher prints the cause
        text = "\n".join([report.traceback.rstrip(), *notes, ""])
        try:
            files.text.write_text(text, encoding="utf-8")
        except OSError:  # no room for it: Python prints all
            return
        _shorten_traceback(world, report, files, error)


def _shorten_traceback(
    world: World, report: FailureReport, files: WorkerFiles, error: BaseException
) -> None:
    """Let Python print an uncaught error in a few lines, or in one on later ranks.

    It ends this process: no worker waits for it any more.

    Under torchrun every rank prints its error, innocent ones among them: whole
    tracebacks of all would hide the line that caused them.
    """
    lines = [first_line(report)]
    if is_first_failure(files.folder):
        lines = [
            *failure_lines(report),
            *_peer_wait(report, files),
            *last_ops(report),
            f"the whole traceback: {files.text} (those of other ranks beside it)",
        ]
    usual = sys.excepthook

    def print_short(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if value is error:
            world.leave(failure_headline(report))
            print("\n".join(lines), file=sys.stderr, flush=True)
        else:
            usual(kind, value, trace)

    sys.excepthook = print_short


def _write_torchrun_report(report: FailureReport) -> None:
    """Write one line for torchrun's summary of failures."""
    if not env.ERROR_FILE.is_set:
        return
    # It takes the earliest for the root cause, in whole seconds.
    own = report.cause is not FailureCause.WAITED
    second = math.floor(report.time_s) if own else math.ceil(report.time_s)
    _write_summary(failure_headline(report), second)


def _write_summary(text: str, second: int) -> None:
    """Write what torchrun shows of this worker."""
    details = {"py_callstack": text, "timestamp": str(second)}
    message = {"message": text, "extraInfo": details}
    write_json(Path(env.ERROR_FILE.text()), {"message": message})


@contextlib.contextmanager
def reports_to_torchrun() -> Iterator[None]:
    """Let torchrun's summary show the error that ends this worker from now on."""
    _report_uncaught()
    yield


@cache  # once in a process
def _report_uncaught() -> None:
    """Write an uncaught error to torchrun's file, unless it holds one already."""
    if not env.ERROR_FILE.is_set:
        return
    usual = sys.excepthook

    def report(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if not Path(env.ERROR_FILE.text()).exists():
            what = f"rank {env.RANK.integer()}: {kind.__name__}: {value}"
            _write_summary("\n".join([what, *user_lines(value)]), int(time.time()))
        usual(kind, value, trace)

    sys.excepthook = report


def _log_report(report: FailureReport) -> None:
    """Log an end without an exception, unless hocket's own launcher does."""
    if not env.JOB_DIR.is_set:
        log.warning("%s", failure_headline(report))


def _peer_wait(report: FailureReport, files: WorkerFiles) -> list[str]:
    """Return what the awaited worker, if on this host, was last doing."""
    rank = report.waits_for_rank
    if rank == NO_RANK:
        return []
    snapshot = read_flight_recorder(WorkerFiles(files.folder, rank).recorder)
    if snapshot is None or not snapshot.entries:
        return []
    return [f"rank {rank} was last seen {stopped_at(snapshot.entries[-1])}"]


def _remove(files: WorkerFiles) -> None:
    """Remove the files after a good end; the last worker removes the folders."""
    files.recorder.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for folder in (files.folder, *list(files.folder.parents)[:2]):
            folder.rmdir()


@contextlib.contextmanager
def _fault_handler(path: Path) -> Iterator[None]:
    """Write the stacks of all threads to a file if the process crashes below Python."""
    if faulthandler.is_enabled():  # the user has enabled it already
        yield
        return
    with path.open("w") as file:
        faulthandler.enable(file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.disable()
            path.unlink()  # still here, so there was no crash


def _report_stuck(
    world: World, files: WorkerFiles, recorder: FlightRecorder, number: int
) -> None:
    """Report a main thread that does not return from a call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    report = dataclasses.replace(
        failure_report(files.rank, recorder.entries(), StoppedBySignal(number)),
        traceback="".join(stack.format()),
        user_lines=tuple(lines_of(stack)),
    )
    write_report(files.report, report)
    world.leave(failure_headline(report))
    _log_report(report)


@contextlib.contextmanager
def _stoppable(on_stuck: Callable[[int], None], *, alone: bool) -> Iterator[None]:
    """Handle SIGTERM and SIGINT, even if the main thread cannot.

    Another handler, such as the user's own, answers alone.

    A signal reaches Python code only between two instructions of the main thread, which
    may sit in a wait for another worker. The byte that Python's C handler writes to the
    wakeup descriptor arrives at once.

        signal ──▶ C handler ──▶ byte ──▶ thread: after a second without an answer,
                       └──▶ main thread:          reports and ends the process
                            sets `answered`, raises
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    answered = threading.Event()
    with contextlib.ExitStack() as stack:
        answer = partial(_raise, answered)
        if is_free(signal.SIGTERM):
            stack.enter_context(signal_handler(signal.SIGTERM, answer))
        stack.enter_context(unraisable_hook(partial(_send_again, answered)))
        if not alone:  # without other workers, the main thread never waits long
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                stack.enter_context(signal_handler(signal.SIGINT, answer))
            stack.enter_context(_watching_signals(answer, answered, on_stuck))
        yield


def _raise(answered: threading.Event, number: int, _frame: FrameType | None) -> None:
    answered.set()
    raise KeyboardInterrupt if number == signal.SIGINT else StoppedBySignal(number)


def _send_again(answered: threading.Event, ignored: BaseException | None) -> bool:
    """Send a signal again whose exception Python ignored; return whether it was one.

    Python ignores what is raised in a callback of a weak reference or in `__del__`.
    """
    if isinstance(ignored, StoppedBySignal):
        number = ignored.number
    elif isinstance(ignored, KeyboardInterrupt):
        number = signal.SIGINT
    else:
        return False
    answered.clear()
    timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return True


@contextlib.contextmanager
def _watching_signals(
    answer: object, answered: threading.Event, on_stuck: Callable[[int], None]
) -> Iterator[None]:
    """End the process, from a thread, if the main thread does not handle a signal."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def watch() -> None:
        while byte := reading.recv(1):
            asked = signal.getsignal(byte[0]) is answer
            if asked and not answered.wait(GRACE_S):
                on_stuck(byte[0])
                os._exit(128 + byte[0])

    thread = threading.Thread(target=watch, name="hocket-signals", daemon=True)
    thread.start()
    try:
        with signal_wakeup(writing.fileno()):
            yield
    finally:
        # Closing is not enough: processes that were forked meanwhile hold it as well.
        writing.shutdown(socket.SHUT_RDWR)
        writing.close()
        if not sys.is_finalizing():  # when no thread runs any more
            thread.join()
        reading.close()
