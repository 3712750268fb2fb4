"""Real processes of tests: their environment, and whether any of them is left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
WORKERS: Final = Path(__file__).with_name("launched_workers.py")
START_S: Final = 20.0  # for some Pythons to import torch on a busy machine
GONE_S: Final = 10.0  # for killed processes to end there


def environment() -> dict[str, str]:
    """Where modules are found, and nothing that says how to run."""
    path = f"{ROOT}:{ROOT / 'src'}"
    return {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def alive_with(text: str) -> list[int]:
    """Find processes by a text, such as a test's folder, in what /proc says of them.

    It is in their command line; or in the name of a file that they have mapped, as each
    worker has its flight recorder: forked workers have their server's command line.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            reported = (folder / "cmdline").read_bytes()
            with contextlib.suppress(PermissionError):  # never one of a test's own
                reported += (folder / "maps").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.encode() in reported and state != "Z":
            found.append(int(folder.name))
    return sorted(set(found) - {os.getpid()})


def none_alive_within(text: str, seconds: float = GONE_S) -> bool:
    """Whether these processes are gone after some seconds at most."""
    return eventually(lambda: not alive_with(text), seconds)


def eventually(happens: Callable[[], bool], seconds: float) -> bool:
    """Whether something happens within some seconds."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if happens():
            return True
        time.sleep(0.02)
    return happens()
