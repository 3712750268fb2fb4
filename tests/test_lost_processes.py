"""Processes of tests that die: one failed test each, the rest runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
LIMIT_S: Final = 100.0

DEADLY: Final = """
import os, signal, subprocess, sys
import pytest

@pytest.mark.parametrize("n", range({num}))
def test_lives(n):
    pass

@pytest.mark.parametrize("name", {names})
def test_dies(name):
    if name == "exit":
        os._exit(3)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(os.getpid(), getattr(signal, name))

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("n", range(5))
def test_together(n):
    if n == 2:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("n", range({num}))
def test_lives_too(n):
    pass
"""


def run_tests(folder: Path, text: str) -> tuple[int, str]:
    """The exit status and output of pytest on one file, with this plugin."""
    (folder / "test_deadly.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.lost_processes"]
    flags = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-q"]
    # In CI pytest repeats each report, uncut, in its summary.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("CI", None)
    environment.pop("BUILD_NUMBER", None)
    done = subprocess.run(
        [*command, *flags, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.timeout(LIMIT_S + 20.0)
@pytest.mark.parametrize("num", [0, 20])
def test_a_dead_process_costs_its_one_test(tmp_path: Path, num: int) -> None:
    """`make test` ended where a convolution aborted, with half of its tests not run.

    Restarts were forbidden, as xdist waited for ever after two of them. Here up to five
    processes die: each test is named with what ended it, once, and all others pass,
    those of the same group included.
    """
    names = ["SIGABRT", "SIGSEGV", "SIGKILL", "exit"]
    status, output = run_tests(tmp_path, DEADLY.format(num=num, names=names))
    assert status == 1
    assert f"5 failed, {2 * num + 4} passed" in output
    for name in names:
        cause = "exit(3)" if name == "exit" else name
        report = re.escape(cause) + rf" ended .*::test_dies\[{name}\]\n"
        assert len(re.findall(report, output)) == 1
    assert re.search(r"SIGKILL ended .*::test_together\[2\]@together\n", output)
