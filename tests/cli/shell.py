"""Call `hocket` as a shell does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def hocket(
    *arguments: str, cwd: Path, timeout_s: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `hocket` with these arguments, and give what it printed and ended with.

    Args:
        arguments: of the command.
        cwd: the folder to run in.
        timeout_s: after which the test fails.
        variables: of the environment, besides this process's.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.run(
        [sys.executable, "-m", "hocket", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "80", **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
