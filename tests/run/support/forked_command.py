"""`hocket ...` in a process that is forked from one that has loaded torch.

The command runs in its own session and folder, with its own output and variables; the
workers that it launches are forked from it. `tests/cli/shell.py` starts a new Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hocket.cli.main import app
from tests.run.support.fork_server import fork_server
from tests.run.support.forked_launch import POPEN, ForkedPopen


def hocket_forked(
    *arguments: str, cwd: Path, timeout_s: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `hocket` with these arguments; return its output and exit code.

    Args:
        arguments: the command's arguments.
        cwd: the folder to run in.
        timeout_s: after which the command is killed and the test fails.
        variables: environment variables, besides the fork server's.

    Raises:
        TimeoutExpired: the command took longer.
    """
    with TemporaryDirectory() as name:
        outputs = [Path(name) / "out.txt", Path(name) / "err.txt"]
        process = fork_server().Process(
            target=_run, args=(arguments, cwd, outputs, {"COLUMNS": "80", **variables})
        )
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        process.kill()
        process.join()
        out, err = (path.read_text() if path.exists() else "" for path in outputs)
    if code is None:
        raise subprocess.TimeoutExpired(arguments, timeout_s, out, err)
    return subprocess.CompletedProcess(arguments, code, out, err)


def _run(
    arguments: Sequence[str],
    cwd: Path,
    outputs: Sequence[Path],
    variables: Mapping[str, str],
) -> None:
    """Become `python -m hocket ARGUMENTS`, started in a folder."""
    os.setsid()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv[:] = ["hocket", *arguments]
    sys.path.insert(0, str(cwd))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POPEN, ForkedPopen)
        app()
