"""Names, locks and how many stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.commit import clean, prune
from hocket.run.checkpoint.format.durable import FolderLock
from hocket.run.checkpoint.format.folder import LATEST, saved
from hocket.run.checkpoint.format.newest import find, newest, previous
from hocket.run.checkpoint.format.opened import is_whole, verify
from tests.run.checkpoint.made import numbers_in, save

HOLD = """
import sys, pathlib
from hocket.run.checkpoint.format.durable import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    """Of the checkpoints, oldest first."""
    return [path.name for path in saved(folder)]


def test_the_newest_stay(tmp_path: Path) -> None:
    """By the order in which they were saved, not by their steps."""
    for step in (1, 2, 9, 3, 4):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-00000009", "step-00000003", "step-00000004"]
    assert newest(tmp_path) == tmp_path / "step-00000004"


def test_all_stay_where_none_is_to_go(tmp_path: Path) -> None:
    """keep=None."""
    for step in range(5):
        save(tmp_path, step, keep=None)
    assert len(names(tmp_path)) == 5


def test_one_that_is_broken_does_not_count(tmp_path: Path) -> None:
    """keep=1 must leave a whole one: here the one that `latest` names is not."""
    for step in (1, 2):
        save(tmp_path, step, keep=None)
    latest = newest(tmp_path)
    assert latest is not None
    (latest / "weights-0.safetensors").unlink()
    assert not is_whole(latest)
    assert prune(tmp_path, 1) == []
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_without_its_pointer_a_folder_has_a_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost `latest` must not look like a folder in which nothing was saved.

    The order of saving decides, and an incomplete checkpoint is passed over.
    """
    for step in (9, 3, 4):
        save(tmp_path, step)
    (tmp_path / LATEST).unlink()
    assert newest(tmp_path) == find(tmp_path, "latest") == tmp_path / "step-00000004"
    assert "latest is missing: taking step-00000004" in caplog.text
    (tmp_path / "step-00000004" / "weights-0.safetensors").unlink()
    assert newest(tmp_path) == tmp_path / "step-00000003"
    assert names(tmp_path) == ["step-00000009", "step-00000003", "step-00000004"]


def test_without_pointer_and_complete_checkpoints_nothing_is_loaded(
    tmp_path: Path,
) -> None:
    """What is left of a run is an error, not an empty folder."""
    path = save(tmp_path, 1)
    (tmp_path / LATEST).unlink()
    (path / "manifest.json").unlink()
    with pytest.raises(DamagedError, match=r"none of the 1 checkpoints .* is complete"):
        newest(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_the_same_step_again_gets_a_name_of_its_own(tmp_path: Path) -> None:
    """Nothing is written over; a number finds the last one saved."""
    save(tmp_path, 5)
    first = newest(tmp_path)
    second = save(tmp_path, 5)
    assert second.name == "step-00000005.1"
    assert newest(tmp_path) == find(tmp_path, 5) == second
    assert previous(tmp_path, second) == [first]
    for path in saved(tmp_path):
        assert numbers_in(path) == {5.0}
        verify(path)


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """And nothing else."""
    save(tmp_path, 1)
    (tmp_path / ".step-00000002").mkdir()
    (tmp_path / ".step-00000002" / "weights-0.safetensors").write_bytes(b"x")
    (tmp_path / ".step-00000001.old").mkdir()
    (tmp_path / "mine.txt").write_text("x")
    clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000001",
        "latest",
        "mine.txt",
    }


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    """Also when that is killed: no stale lock is ever in the way."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        words = rf"process {process.pid} on {os.uname().nodename}\)"
        with pytest.raises(CheckpointError, match=words):
            FolderLock(tmp_path)
        process.kill()
    FolderLock(tmp_path).release()


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A data loader's worker may outlive the run that made it."""
    program = (
        "import os, pathlib, sys, time\n"
        "from hocket.run.checkpoint.format.durable import FolderLock\n"
        f"lock = FolderLock(pathlib.Path({str(tmp_path)!r}))\n"
        "ready, report = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(1); os.write(report, b'x'); time.sleep(5); os._exit(0)\n"
        "os.read(ready, 1)\n"
        "print('gone', flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "gone\n"
    FolderLock(tmp_path).release()
