"""`hocket ...` in a process that is forked from one that has loaded torch.

The command runs in its own session and folder, with its own output and variables; the
workers that it launches are forked from it. `tests/cli/shell.py` starts a new Python.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.run.support.forked_python import run_forked_python


def hocket_forked(
    *arguments: str, cwd: Path, timeout_s: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `hocket` with these arguments; return its output and exit code.

    Args:
        arguments: the command's arguments.
        cwd: the folder to run in.
        timeout_s: after which the command is killed and the test fails.
        variables: environment variables, besides this process's.

    Raises:
        TimeoutExpired: the command took longer.
    """
    return run_forked_python(
        ["-m", "hocket", *arguments],
        cwd,
        timeout_s=timeout_s,
        variables={**os.environ, "COLUMNS": "80", **variables},
    )
