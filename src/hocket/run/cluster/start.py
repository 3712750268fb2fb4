"""The entry point of a worker process that `hocket.launch` starts.

It makes sure that it ends with its launcher and that its end leaves a report, whatever
happens; then it imports the entry function and calls it. torch is not imported before,
since the flight recorder must exist while torch loads.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, TypedDict

from hocket import env
from hocket.errors import RunError
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
    _end_with_launcher(env.LAUNCHER_PID.integer())
    folder = attempt_dir(Path(env.JOB_DIR.text()), env.ATTEMPT.integer())
    files = WorkerFiles(folder, env.RANK.integer())
    recorder = FlightRecorder.create(files.recorder, os.getpid())
    recorder.begin("start", STARTING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        write_json(files.result, _call(job["entry"], job["args"]))
    except BaseException as error:  # of any kind: the launcher must report it
        report = failure_report(files.rank, recorder.entries(), error)
        if report.code == 0:  # sys.exit() with nothing to complain about
            write_json(files.result, None)
        elif not files.report.exists():  # `reporting` knows more
            write_report(files.report, report)
        _leave(report.code)


def _call(entry: str, args: Sequence[Json]) -> Json:
    """Import the function and call it."""
    module_name, _, path = entry.rpartition(":")
    module: object = (
        _import_script(Path(module_name))
        if module_name.endswith(".py")
        else importlib.import_module(module_name)
    )
    function = module
    for name in path.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        raise RunError(f"entry {entry!r}: {module_name} has no function {path!r}")
    result: Json = function(*args)
    return result


def _import_script(path: Path) -> object:
    """Import the script that the user started, without its `__main__` part.

    The name is the one that multiprocessing uses, so that processes which the worker
    starts (a DataLoader's) find the script's functions too.
    """
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    if spec is None or spec.loader is None:
        raise RunError(f"entry {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return module


def _end_with_launcher(launcher_pid: int) -> None:
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
