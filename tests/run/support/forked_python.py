"""`python ARGUMENTS` in a process that is forked from one that has loaded torch.

The process has a session, output, variables and arguments of its own, and nothing of
its parent's is open in it. What launchers start in it is forked, too. A new
Python would import torch and hocket first, which takes seconds in each process.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from tests.run.support.fork_server import fork_server
from tests.run.support.processes import environment

# Where `hocket.launch` and torch's launcher start their workers.
_POPENS: Final = (
    "hocket.run.cluster.launch.Popen",
    "torch.distributed.elastic.multiprocessing.subprocess_handler."
    "subprocess_handler.Popen",
)
_RESET: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FIRST_OWN_FD: Final = 3


class ForkedPython:
    """A process that the fork server has started, used as a `subprocess.Popen`.

    Args:
        process: the process, which has begun.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; minus the signal's number if a signal killed it.

        Raises:
            TimeoutExpired: the process runs on after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("forked python", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def run_forked_python(
    arguments: Sequence[str | Path],
    cwd: Path,
    *,
    timeout_s: float = 50.0,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a folder; return its output and exit code.

    Args:
        arguments: a script, `-m module` or `-c program`, and its arguments; before
            that perhaps `-W error`.
        cwd: the folder to run in.
        timeout_s: after which it is killed.
        variables: its whole environment; `environment()`, when not given.

    Raises:
        TimeoutExpired: it took longer.
    """
    with TemporaryDirectory() as name:
        out, err = Path(name) / "out.txt", Path(name) / "err.txt"
        given = environment() if variables is None else variables
        process = start_python(arguments, (out, err), given, cwd=cwd)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(
            arguments, code, out.read_text(), err.read_text()
        )


def start(arguments: Sequence[str | Path], folder: Path) -> ForkedPython:
    """Start `python ARGUMENTS`, which writes to `out.txt` and `err.txt` in a folder."""
    outputs = folder / "out.txt", folder / "err.txt"
    return start_python(arguments, outputs, environment())


def start_python(
    arguments: Sequence[str | Path],
    outputs: tuple[Path, Path],
    variables: Mapping[str, str],
    *,
    cwd: Path | None = None,
    enter: Callable[[], None] | None = None,
) -> ForkedPython:
    """Start `python ARGUMENTS`, and return at once.

    Args:
        arguments: a script, `-m module` or `-c program`, and its arguments.
        outputs: the files that take what it writes to stdout and stderr.
        variables: its whole environment.
        cwd: the folder to run in; this process's, when not given.
        enter: called before anything else runs; a function that can be pickled.
    """
    process = fork_server().Process(
        target=_become,
        args=(
            [str(x) for x in arguments],
            outputs,
            dict(variables),
            cwd or Path.cwd(),
            enter,
        ),
    )
    process.start()
    return ForkedPython(process)


def _become(
    arguments: Sequence[str],
    outputs: tuple[Path, Path],
    variables: Mapping[str, str],
    cwd: Path,
    enter: Callable[[], None] | None,
) -> None:
    os.setsid()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if enter is not None:
        enter()
    os.chdir(cwd)
    _begin(variables)
    with fork_instead_of_popen():
        _run(arguments)


@contextmanager
def fork_instead_of_popen(*names: str) -> Iterator[None]:
    """Let launchers fork the Pythons that they start in this process.

    Args:
        names: where `Popen` is; of `hocket.launch` and torch, when not given.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in names or _POPENS:
            patch.setattr(name, ForkedPopen)
        yield


class ForkedPopen(subprocess.Popen[Any]):
    """A `python ARGUMENTS` that is forked from this process, not executed."""

    def _execute_child(self, args: Sequence[str], *more: Any) -> None:
        # executable, preexec_fn, close_fds, pass_fds, cwd, env
        passed, variables = more[3], more[5]
        receiver, sender = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            _close_all_but(passed)
            _run_and_exit(args[1:], variables)
        os.close(sender)
        os.read(receiver, 1)  # until the worker has its own session
        os.close(receiver)
        self._child_created = True


def _close_all_but(kept: Sequence[int]) -> None:
    first = _FIRST_OWN_FD
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _run_and_exit(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Become a new Python: run what the arguments name, and end."""
    code = 1
    try:
        _begin(variables)
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _begin(variables: Mapping[str, str]) -> None:
    """Have what a new Python has: variables, signal handlers, no resource tracker."""
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)


def _run(arguments: Sequence[str]) -> None:
    """Run `-c program`, `-m module` or a script as Python's `__main__`."""
    first, *others = [x for x in arguments if x != "-u"]
    if first == "-W":
        warnings.resetwarnings()
        warnings.simplefilter("error")
        _, first, *others = others
    if first == "-c":
        program, *others = others
        sys.argv[:] = ["-c", *others]
        exec(program, {"__name__": "__main__"})
    elif first == "-m":
        module, *others = others
        sys.argv[:] = [module, *others]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(module, None)  # the server may have imported it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [first, *others]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
