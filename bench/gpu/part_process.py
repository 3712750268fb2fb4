"""Starts Python in a process group of its own, and ends it with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

_GRACE_S: Final = 5.0  # a process that is inside the driver may not end at once


def start_python(arguments: Sequence[str], output: Path) -> Popen[Any]:
    """Start `python ARGUMENTS`; what it prints goes to a file."""
    with output.open("wb") as file:
        return Popen(
            [sys.executable, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ},
        )


def end(process: Popen[Any], deadline_s: float) -> int | None:
    """Wait for a process until a time, then kill it and all that it started.

    Args:
        process: from `start_python`.
        deadline_s: in the time of `time.monotonic`.

    Returns:
        Its exit code; None if it was killed.
    """
    try:
        code: int | None = process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return code
    # If it stays inside the driver, the next part must do without what it holds.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    return code
