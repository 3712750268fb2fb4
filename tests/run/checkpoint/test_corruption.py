"""Whatever happens to its files, a checkpoint is whole or it is refused."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.opened import verify
from tests.run.checkpoint.made import save, save_by_two

NUM_FLIPS = 700
NUM_CUTS = 100


def all_files(folder: Path) -> list[Path]:
    """Those of the newest checkpoint, and `latest`."""
    path = open_one(folder).path
    return [folder / "latest", *sorted(path.iterdir())]


def check(folder: Path) -> None:
    """What a load does: from `latest` to the last byte."""
    verify(open_one(folder).path)


def check_refused(folder: Path, path: Path, content: bytes | None) -> None:
    """A file's other content, or that it is missing, is found; put the file back."""
    good = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedError, match=re.escape(path.name)):
        check(folder)
    path.write_bytes(good)


def test_any_flipped_bit_is_found_and_its_file_named(tmp_path: Path) -> None:
    """Every file in proportion to nothing: small ones are as precious."""
    save(tmp_path, 1)
    save_by_two(tmp_path, 2)
    check(tmp_path)
    files = all_files(tmp_path)
    rng = random.Random(1)

    for i in range(NUM_FLIPS):
        path = files[i % len(files)]
        content = bytearray(path.read_bytes())
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        check_refused(tmp_path, path, bytes(content))

    check(tmp_path)


def test_any_truncation_is_found_and_its_file_named(tmp_path: Path) -> None:
    """Cut off anywhere, or with something after its end."""
    save_by_two(tmp_path, 2)
    files = all_files(tmp_path)
    rng = random.Random(2)

    for i in range(NUM_CUTS):
        path = files[i % len(files)]
        good = path.read_bytes()
        at = rng.randrange(len(good) + 1)
        struck = good[:at] if at < len(good) else good + b"\0"
        check_refused(tmp_path, path, struck)


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    """Each of them."""
    save_by_two(tmp_path, 2)
    for path in all_files(tmp_path)[1:]:
        check_refused(tmp_path, path, None)


def test_files_of_another_worker_or_step_are_found(tmp_path: Path) -> None:
    """Two shards exchanged; one shard or part of the checkpoint before."""
    old, new = save_by_two(tmp_path, 1), save_by_two(tmp_path, 2)
    a, b = new / "weights-0.safetensors", new / "weights-1.safetensors"
    a.rename(new / "x")
    b.rename(a)
    (new / "x").rename(b)
    with pytest.raises(DamagedError, match=r"weights-0\.safetensors"):
        check(tmp_path)
    a.rename(new / "x")
    b.rename(a)
    (new / "x").rename(b)
    check(tmp_path)

    for name in ("optimizer-1.safetensors", "part-0.json", "manifest.json"):
        check_refused(tmp_path, new / name, (old / name).read_bytes())


def test_a_renamed_checkpoint_is_found(tmp_path: Path) -> None:
    """Its step stands in its manifest."""
    path = save(tmp_path, 7)
    moved = path.rename(tmp_path / "step-00000008")
    with pytest.raises(DamagedError, match="of step 7"):
        verify(moved)
    with pytest.raises(DamagedError, match="names step-00000007, which is not there"):
        open_one(tmp_path)


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    """A link could lead anywhere, and opening a pipe would wait for ever."""
    path = save(tmp_path / "a", 1)
    file = path / "weights-0.safetensors"
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(DamagedError, match="weights-0"):
        verify(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DamagedError, match="no regular file"):
        verify(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """Nothing there, an empty folder, a step that was not saved, a wrong word."""
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}/none"):
        open_one(tmp_path / "none")
    with pytest.raises(CheckpointError, match="Nothing was saved in"):
        open_one(tmp_path)
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"of step 4\. .* has step-00000003"):
        open_one(tmp_path, step=4)
    with pytest.raises(CheckpointError, match="'latest', or a number"):
        open_one(tmp_path, step="newest")
