"""Every example runs, as its own first lines say, and stays under 80 lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.toml")])
PROFILES = ["--set", "run.profile_folder=profiles"]


def run(command: list[str], cwd: Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_is_short(path: Path) -> None:
    """An example that is longer is not read."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


def test_choose_a_schedule(tmp_path: Path) -> None:
    """One line per schedule; interleaving has the smallest bubble."""
    lines = run(
        [sys.executable, str(FOLDER / "choose_a_schedule.py")], tmp_path
    ).splitlines()

    assert [line.split()[0] for line in lines] == [
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
    ]


def test_write_a_schedule(tmp_path: Path) -> None:
    """The right one is proved, the wrong one explained."""
    output = run([sys.executable, str(FOLDER / "write_a_schedule.py")], tmp_path)

    assert "num_buffers=" in output
    assert "no lane can move" in output


def test_train_your_model_is_the_same_on_one_worker_and_under_torchrun(
    tmp_path: Path,
) -> None:
    """One process, and two that torchrun starts, print the same losses."""
    script = str(FOLDER / "train_your_model.py")
    alone = run([sys.executable, script], tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    both = run([*torchrun, "--nproc-per-node", "2", script], tmp_path)

    assert alone.count("epoch") == 3
    assert both == alone


def test_a_recipe_of_own_functions(tmp_path: Path) -> None:
    """Found beside the recipe's file, from wherever it is called; and they learn."""
    recipe = str(FOLDER / "wine.toml")
    hocket = [sys.executable, "-m", "hocket", "train", recipe]
    output = run([*hocket, "--run-dir", "mine", *PROFILES], tmp_path)

    accuracies = re.findall(r"^accuracy ([\d.]+)%", output, re.MULTILINE)
    assert len(accuracies) == 1
    assert float(accuracies[0]) > 80
    assert list((tmp_path / "mine" / "checkpoints").glob("step-*"))


def test_train_and_save_goes_on_where_it_was(tmp_path: Path) -> None:
    """Two workers go on from what one has saved, and stop when nothing gets better."""
    script = str(FOLDER / "train_and_save.py")
    first = run([sys.executable, script], tmp_path)
    saved = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    second = run([*torchrun, "--nproc-per-node", "2", script], tmp_path)

    assert first.startswith("step 49: ")
    assert len(saved) == 2
    last = int(saved[-1].removeprefix("step-"))
    assert f"step {last - 1}: " in first
    if second:  # the first may have come to the end
        assert second.startswith(f"step {last + 49}: ")
