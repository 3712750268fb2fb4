"""`hocket.launch` whose processes are forked from one that has loaded torch.

All is as `launch` does it: workers are children of the launching process, in sessions
of their own. But neither that process nor a worker loads Python, torch and hocket anew,
which takes seconds each.

    fork server ──fork──▶ process that calls `launch` ──fork──▶ workers
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest

from hocket.errors import WorkerError
from hocket.run.cluster.launch import launch
from tests.run.support.fork_server import fork_server

POPEN: Final = "hocket.run.cluster.worker_processes.Popen"
_RESET: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch_forked(entry: str, args: Sequence[Any] = (), **options: Any) -> list[Any]:
    """Call `launch` in a forked process, whose workers are forked from it.

    Args:
        entry: `module:function`.
        args: the function's arguments: JSON values only.
        options: keyword arguments of `launch`.

    Returns:
        What each worker's function returned, by rank.

    Raises:
        WorkerError: as `launch` raised it.
        EOFError: the launching process ended in another way; its output says why.
    """
    server = fork_server()
    receiver, sender = server.Pipe(duplex=False)
    process = server.Process(target=_launch, args=(sender, entry, args, options))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
        process.join()
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(found, tuple):
        raise WorkerError(*found)
    results: list[Any] = found
    return results


def _launch(
    sender: Connection, entry: str, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Send the workers' results, or message, rank and exit code of the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POPEN, ForkedPopen)
        try:
            sender.send(launch(entry, args, **options))
        except WorkerError as error:
            sender.send((str(error), error.rank, error.exit_code))


class ForkedPopen(subprocess.Popen[Any]):
    """A `python -c PROGRAM ...` that is forked from this process, not executed."""

    def _execute_child(self, args: Sequence[str], *more: Any) -> None:
        variables = more[5]  # executable, preexec_fn, close_fds, pass_fds, cwd, env
        receiver, sender = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.close(sender)
            _run_program(args[args.index("-c") + 1 :], variables)
        os.close(sender)
        os.read(receiver, 1)  # until the worker has its own session
        os.close(receiver)
        self._child_created = True


def _run_program(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Become the new Python: run the program, and end."""
    code = 1
    try:
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(variables)
        program, *sys.argv[1:] = arguments
        exec(program, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
