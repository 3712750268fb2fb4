"""The entry point of a worker process that `hocket.launch` starts.

It makes sure that it ends with its launcher and that its end leaves a report, whatever
happens; then it imports the entry function and calls it. torch is not imported before,
since the flight recorder must exist while torch loads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, TypedDict

from hocket import env
from hocket.run.cluster.entry import load_entry
from hocket.run.diagnostics.failure import failure_report, write_report
from hocket.run.diagnostics.flight_recorder import STARTING, FlightRecorder
from hocket.run.diagnostics.job_folder import Json, WorkerFiles, attempt_dir, write_json

_PR_SET_PDEATHSIG: Final = 1

# What `python -c` runs: the launcher's search path first, as multiprocessing does it.
PROGRAM: Final = (
    "import json, pathlib, signal, sys; "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "job = json.loads(pathlib.Path(sys.argv[1]).read_text()); "
    "sys.path[:] = job['sys_path']; sys.argv[:] = job['argv']; "
    "from hocket.run.cluster.start import main; main(job)"
)


class WorkerStart(TypedDict):
    """The launcher's parameters for its workers, written to `job.json`.

    Keys:
        entry: `module:function` or `/path/to/script.py:function`.
        args: the function's arguments.
        sys_path: the module search path.
        argv: the launching process's arguments, for scripts that read them.
    """

    entry: str
    args: Sequence[Json]
    sys_path: list[str]
    argv: list[str]


def main(job: WorkerStart) -> None:
    """Call the entry function; does not return if it fails."""
    end_with_launcher(env.LAUNCHER_PID.integer())
    folder = attempt_dir(Path(env.JOB_DIR.text()), env.ATTEMPT.integer())
    files = WorkerFiles(folder, env.RANK.integer())
    recorder = FlightRecorder.create(files.recorder, os.getpid())
    recorder.begin("start", STARTING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        write_json(files.result, load_entry(job["entry"])(*job["args"]))
    except BaseException as error:  # of any kind: the launcher must report it
        report = failure_report(files.rank, recorder.entries(), error)
        if report.code == 0:  # sys.exit() with nothing to complain about
            write_json(files.result, None)
        elif not files.report.exists():  # `reporting` knows more
            write_report(files.report, report)
        _leave(report.code)


def end_with_launcher(launcher_pid: int) -> None:
    """Let the kernel end this process when the launcher ends, in whatever way.

    It ends the processes that this one forks with this one. Those that read data would
    read on; torch's own notice after 5 s, if they do not read.
    """
    end_with_parent()
    in_main = threading.local()

    def note() -> None:
        in_main.value = is_main_thread()

    os.register_at_fork(
        before=note, after_in_child=lambda: end_with_parent() if in_main.value else None
    )
    if os.getppid() != launcher_pid:  # it ended before this call
        sys.exit(env.ExitCode.WORKER)


def is_main_thread() -> bool:
    """Return whether this thread lives as long as its process."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent() -> None:
    """Let the kernel end this process when the thread ends that has started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(code: int) -> NoReturn:
    """End the process at once, whatever a failed worker has left open."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
