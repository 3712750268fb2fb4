"""What can be seen to be wrong at once is said before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

# Ends with 9 where torch was imported on the way to the error.
COMMAND: Final = """
import sys
from hocket.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as ended:
    sys.exit(9 if "torch" in sys.modules else ended.code)
"""

FAULTS: Final = {
    "a folder that is not empty": ("--run-dir full", "full is not empty"),
    "a file in the way": ("--run-dir full/x/run", "full/x/run: Not a directory"),
    "runs below it": ("--set run.folder=full/x", "cannot write into full/x: Not a"),
    "what the kernel refuses to root": ("--run-dir /proc/run", "write into /proc/run"),
    "no folder to go on in": ("--resume auto", "name it with --run-dir"),
    "no such checkpoint": ("--resume nowhere", "nowhere. Nothing was saved in"),
    "a faulty recipe": ("--set pipeline.schedule=1f1", "did you mean '1f1b'"),
}


def called(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a command prints and ends with."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_folder_or_checkpoint_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """And nothing is written."""
    arguments, words = FAULTS[name]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("precious")
    done = called("train", "digits-vit", *arguments.split(), cwd=tmp_path)
    assert words in done.stderr
    assert done.returncode not in (0, 9), done.stderr
    assert sorted(x.name for x in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize("name", ["digits-vit-1", "digits-vit-2"])
def test_a_folder_of_shared_jobs_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Each job has its own; and nothing is written."""
    (tmp_path / "all" / name).mkdir(parents=True)
    (tmp_path / "all" / name / "x").write_text("precious")
    given = ("share", "digits-vit", "digits-vit", "--run-dir", "all")
    done = called(*given, cwd=tmp_path)
    assert f"all/{name} is not empty" in done.stderr
    assert done.returncode not in (0, 9), done.stderr
    assert [x.name for x in (tmp_path / "all").iterdir()] == [name]


@pytest.mark.parametrize("option", ["--hardware", "--links"])
def test_a_name_of_hardware_is_refused_at_once(tmp_path: Path, option: str) -> None:
    """It lists those that there are."""
    given = ("plan", "digits-vit", "--devices", "4", option, "nope")
    done = called(*given, cwd=tmp_path)
    assert "is named 'nope'; there are" in done.stderr
    assert done.returncode not in (0, 9), done.stderr
