"""Every example runs, as its own first lines say, and stays under 80 lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked_command import hocket_forked
from tests.run.support.forked_python import run_forked_python

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted([*FOLDER.rglob("*.py"), *FOLDER.rglob("*.toml")])
PROFILES = ["--set", "run.profile_folder=profiles"]
PIPELINES: Final = ("train_your_model.py", "train_and_save.py", "trace_steps.py")
END: Final = "=== end\n"
IN_TURN: Final = f"""
import os, runpy, sys

if __name__ == "__main__":
    for path in sys.argv[1:]:
        runpy.run_path(path, run_name="__main__")
        if os.environ.get("RANK", "0") == "0":
            print({END!r}, end="", flush=True)
"""


def pipelines(test: Any) -> Any:
    """For tests of what one process has run: they are in that, and have its time."""
    group = pytest.mark.xdist_group("examples of pipelines")
    return pytest.mark.timeout(240)(group(test))


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


def run_forked(arguments: list[str], cwd: Path) -> str:
    """What `python ARGUMENTS` prints in a forked process; it must succeed."""
    done = run_forked_python(arguments, cwd, timeout_s=100.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_is_short() -> None:
    """An example that is longer is not read; zoo has what recipes name, by task."""
    sizes = {path: len(path.read_text().splitlines()) for path in EXAMPLES}
    most = {path: 400 if path.parent.name == "zoo" else 80 for path in EXAMPLES}
    assert [path for path in EXAMPLES if sizes[path] >= most[path]] == []


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


@dataclass(frozen=True, slots=True)
class Reported:
    """What an example prints.

    Args:
        alone: in one process.
        both: after that, in two that torchrun starts; only one of them prints.
    """

    alone: str
    both: str


@dataclass(frozen=True, slots=True)
class Runs:
    """What came of running all examples of pipelines, in one folder.

    Args:
        reported: what each example printed, by its name.
        saved: checkpoints that were there after the runs in one process.
        traces: the names of what each worker has traced, by the name of its file.
    """

    reported: Mapping[str, Reported]
    saved: Sequence[str]
    traces: Mapping[str, Sequence[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each as a script, one after the other: to start processes takes longer.

    All Pythons are forked; users' own are new in tests/documents/test_documents.py.
    """
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "in_turn.py").write_text(IN_TURN)
    scripts = [str(folder / "in_turn.py"), *(str(FOLDER / x) for x in PIPELINES)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone = run_forked(scripts, folder).split(END)
    saved = sorted(path.name for path in (folder / "run").glob("step-*"))
    both = run_forked([*torchrun, *scripts], folder).split(END)
    assert len(alone) == len(both) == len(PIPELINES) + 1
    reported = map(Reported, alone, both)
    traces = {
        path.name: [x["name"] for x in json.loads(path.read_text())["traceEvents"]]
        for path in (folder / "traces").iterdir()
    }
    return Runs(dict(zip(PIPELINES, reported, strict=False)), saved, traces)


@pipelines
def test_train_your_model_is_the_same_on_one_worker_and_under_torchrun(
    runs: Runs,
) -> None:
    """One process, and two that torchrun starts, print the same losses."""
    reported = runs.reported["train_your_model.py"]

    assert reported.alone.count("epoch") == 3
    assert reported.both == reported.alone


@pipelines
def test_train_and_save_goes_on_where_it_was(runs: Runs) -> None:
    """Two workers go on from what one has saved, and stop when nothing gets better."""
    reported = runs.reported["train_and_save.py"]

    assert reported.alone.startswith("step 49: ")
    assert len(runs.saved) == 2
    last = int(runs.saved[-1].removeprefix("step-"))
    assert f"step {last - 1}: " in reported.alone
    if reported.both:  # the first may have come to the end
        assert reported.both.startswith(f"step {last + 49}: ")


@pipelines
def test_trace_steps_traces_the_chosen_steps_of_each_worker(runs: Runs) -> None:
    """And no others: both forwards and updates of two steps are in each file."""
    reported = runs.reported["trace_steps.py"]

    assert reported.alone == "written: traces/steps-3-4-rank-0.json\n"
    assert reported.both == reported.alone
    assert {*runs.traces} == {f"steps-3-4-rank-{rank}.json" for rank in (0, 1)}
    for names in runs.traces.values():
        steps = {name for name in names if name.startswith("ProfilerStep#")}
        assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
        assert names.count("aten::addmm") == 2 * 4  # four microbatches, one layer each
        assert names.count("Optimizer.step#AdamW.step") == 2


def test_a_recipe_of_own_functions(tmp_path: Path) -> None:
    """Found beside the recipe's file, from any folder; and their losses fall."""
    recipe = str(FOLDER / "wine.toml")
    done = hocket_forked(
        *("train", recipe, "--run-dir", "mine", *PROFILES),
        cwd=tmp_path,
        timeout_s=100.0,
    )
    assert done.returncode == 0, done.stderr

    accuracies = re.findall(r"^accuracy ([\d.]+)%", done.stdout, re.MULTILINE)
    assert len(accuracies) == 1
    assert float(accuracies[0]) > 80
    assert list((tmp_path / "mine" / "checkpoints").glob("step-*"))
