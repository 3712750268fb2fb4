"""Killed or out of room at any moment of a save: the one before is there, whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from hocket.errors import CheckpointError
from hocket.run.checkpoint.commit import clean
from hocket.run.checkpoint.format.folder import saved
from hocket.run.checkpoint.format.newest import newest
from tests.run.checkpoint.faults import CHANGING, disk_is_full, save_and_die, struck
from tests.run.checkpoint.made import files_below, numbers_in, save
from tests.run.support.fork_server import fork_server

KEEP = 2
MIN_CALLS, MAX_CALLS = 20, 200  # a save makes more than the first, far less than 200


def killed(context: ForkServerContext, folder: Path, step: int, at: int) -> bool:
    """Save in a process of its own; whether it was killed before its end."""
    process = context.Process(target=save_and_die, args=(str(folder), step, KEEP, at))
    process.start()
    process.join(60)
    assert process.exitcode in {0, -9}
    return process.exitcode != 0


@pytest.mark.parametrize("num_before", [0, 3])
def test_killed_at_any_call_the_folder_has_a_whole_checkpoint(
    num_before: int, tmp_path: Path
) -> None:
    """SIGKILL before each open, write (half of it done), fsync, rename and removal.

    `latest` names the old one or the new one, never a mixture; and the next run saves
    there as if nothing had been.
    """
    context = fork_server()
    start = tmp_path / "start"
    start.mkdir()
    for step in range(1, num_before + 1):
        save(start, step, KEEP)
    new = num_before + 1
    seen = set()

    for at in range(1, MAX_CALLS):
        folder = tmp_path / f"at-{at}"
        shutil.copytree(start, folder)
        if not killed(context, folder, new, at):
            break
        latest = newest(folder)
        seen.add(0 if latest is None else int(min(numbers_in(latest))))
        for path in saved(folder):
            assert len(numbers_in(path)) == 1, path
        clean(folder)
        save(folder, new + 1, KEEP)
        latest = newest(folder)
        assert latest is not None
        assert numbers_in(latest) == {new + 1}
        assert not [name for name in files_below(folder) if name.startswith(".")]

    assert at > MIN_CALLS
    assert seen == {num_before, new}


def error_of(folder: Path, step: int = 3, keep: int | None = KEEP) -> str:
    """What a save says."""
    try:
        save(folder, step, keep)
    except CheckpointError as error:
        return str(error)
    return ""


def test_out_of_room_at_any_call_the_older_ones_stay(tmp_path: Path) -> None:
    """The error says so, and nothing is left of what was being written."""
    start = tmp_path / "start"
    for step in (1, 2):
        save(start, step, KEEP)
    num_errors = 0

    for at in range(1, MAX_CALLS):
        folder = tmp_path / f"at-{at}"
        shutil.copytree(start, folder)
        before = files_below(folder)
        with struck(at, CHANGING, disk_is_full) as was_struck:
            said = error_of(folder)
        if said:
            num_errors += 1
            assert "No space left on device" in said
            assert str(folder) in said
        if not was_struck():
            break
        latest = newest(folder)
        assert latest is not None
        numbers = numbers_in(latest)
        assert numbers in ({2.0}, {3.0})
        if numbers == {2.0}:
            assert files_below(folder) == before

    assert num_errors > 15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of sixteen pages."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    mounted = shutil.which("mount") is not None and os.geteuid() == 0
    if not mounted or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_costs_no_older_checkpoint(small_disk: Path) -> None:
    """Saving until there is no room, and again when there is some."""
    folder = small_disk / "run"
    step = 0
    while step < 100:
        step += 1
        said = error_of(folder, step, keep=None)
        if said:
            break
    assert "No space left on device" in said
    kept = saved(folder)
    assert [numbers_in(path) for path in kept] == [{float(i)} for i in range(1, step)]
    assert newest(folder) == kept[-1]
    assert not list(folder.glob(".step-*"))
    shutil.rmtree(kept[0])
    save(folder, step, keep=None)
    assert numbers_in(saved(folder)[-1]) == {float(step)}


def test_a_disk_that_may_not_be_written_to(small_disk: Path) -> None:
    """The error says so; the older checkpoint stays, and the next one is possible."""
    folder = small_disk / "run"
    save(folder, 1)
    remount(small_disk, "ro")
    assert "Read-only file system" in error_of(folder, 2)
    latest = newest(folder)
    assert latest is not None
    assert numbers_in(latest) == {1.0}
    remount(small_disk, "rw")
    assert error_of(folder, 3) == ""
    assert [numbers_in(path) for path in saved(folder)] == [{1.0}, {3.0}]


def remount(disk: Path, how: str) -> None:
    """Let it be written to, or not."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)
