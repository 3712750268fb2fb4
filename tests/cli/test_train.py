"""`hocket train`: from a recipe to a run's folder, or to an error that says why not."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from hocket import env
from hocket.cli import train
from hocket.cli.main import app
from hocket.env import ExitCode
from hocket.recipes.config.resolve import resolve
from tests.run.support.forked_command import hocket_forked

RUN_TIMEOUT_S: Final = 200.0  # a tenth of it on free cores

# As small as a run can be that has an evaluation and a full last step.
SMALL: Final = (
    "model.width=16",
    "model.num_heads=2",
    "model.num_blocks=2",
    "model.mlp_width=16",
    "training.num_epochs=1",
    "training.max_steps=4",
    "pipeline.num_microbatches=2",
    "run.profile_folder=profiles",
)


def settings(*values: str) -> list[str]:
    """`--set` before each."""
    return [word for value in values for word in ("--set", value)]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(220)
def test_digits_vit_on_two_workers(free_dir: Path) -> None:
    """The main job in small: every file of the run's folder is there and valid.

    With Pythons that start anew it is in tests/test_wheel.py.
    """
    done = hocket_forked(
        "train", "digits-vit", *settings(*SMALL), cwd=free_dir, timeout_s=RUN_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    (run_dir,) = (free_dir / "runs").iterdir()

    recipe = resolve(str(run_dir / "recipe.toml")).recipe
    assert recipe == resolve("digits-vit", SMALL).recipe
    kinds = [record["kind"] for record in records(run_dir)]
    assert kinds == ["step"] * 4 + ["epoch", "evaluation", "summary"]
    *_, evaluation, summary = records(run_dir)
    assert evaluation["num_samples"] == 450
    assert 0 <= evaluation["accuracy"] == summary["accuracy"] <= 1
    assert summary["num_samples"] == 4 * 64
    assert 0 < summary["predicted_bubble_fraction"] < 1
    assert 0 < summary["measured_bubble_fraction"] < 1
    assert list((run_dir / "tensorboard").glob("events*"))
    page = (run_dir / "report.html").read_text()
    assert "predicted" in page
    assert "measured" in page
    assert "num_microbatches = 2  # --set" in page
    assert "stages: 2, from patches, " in done.stdout
    assert f"report: {run_dir.relative_to(free_dir)}/report.html" in done.stdout
    assert not done.stderr
    assert list((free_dir / "profiles").iterdir())


@pytest.mark.timeout(220)
def test_text_gpt_inside_torchrun(free_dir: Path) -> None:
    """With RANK set, `hocket train` is one worker; rank 0 writes the folder.

    The workers meet in a file, as those of `hocket.launch`: torchrun would listen on
    the network.
    """
    (free_dir / "text.txt").write_text("To be, or not to be: " * 100)
    arguments = settings(
        *SMALL,
        "data.path=text.txt",
        "data.window_bytes=16",
        "training.batch_size=8",
    )

    def worker(rank: int) -> subprocess.CompletedProcess[str]:
        return hocket_forked(
            "train",
            "text-gpt",
            "--run-dir=mine",
            *arguments,
            cwd=free_dir,
            timeout_s=RUN_TIMEOUT_S,
            RANK=str(rank),
            WORLD_SIZE="2",
            HOCKET_JOB_DIR=str(free_dir / "job"),
        )

    with ThreadPoolExecutor() as pool:
        main, other = pool.map(worker, range(2))
    assert main.returncode == 0, main.stderr
    assert other.returncode == 0, other.stderr
    assert not other.stdout
    *_, summary = records(free_dir / "mine")
    assert summary["bits_per_byte"] > 0


def test_a_dry_run_leaves_nothing(
    free_dir: Path,
) -> None:
    """It shows the recipe and its numbers, and starts and writes nothing."""
    result = CliRunner().invoke(
        app, ["train", "digits-vit", "--dry-run", "--workers=4", *settings(*SMALL)]
    )
    assert result.exit_code == 0
    assert "num_workers = 4  # --set" in result.stdout
    assert "1,347 samples to train on, 450 to evaluate on; 4 steps" in result.stdout
    assert "21 batches per epoch" in result.stdout
    assert not list(free_dir.iterdir())


def test_a_layout_replaces_the_numbers_of_the_recipe(free_dir: Path) -> None:
    """And contradicts a number of workers that is said beside it."""
    layout = ["train", "digits-vit", "--dry-run", "--layout=4x2", *settings(*SMALL)]
    result = CliRunner().invoke(app, layout)
    assert result.exit_code == 0, result.output
    assert 'layout = "4x2"  # --set' in result.stdout
    assert "num_workers = 8" in result.stdout
    refused = CliRunner().invoke(app, [*layout, "--workers=4"])
    assert refused.exit_code == 2
    assert "layout 4x2 is 8 workers in 2 replicas" in refused.stderr


def test_a_layout_has_shards_as_its_third_number(free_dir: Path) -> None:
    """They replace those of the recipe, too."""
    numbers = [*SMALL, "pipeline.num_shards=2"]
    command = ["train", "digits-vit", "--dry-run", *settings(*numbers)]
    result = CliRunner().invoke(app, [*command, "--layout=4x2x2"])
    assert result.exit_code == 0, result.output
    for line in ("num_workers = 16 ", "num_replicas = 2 ", "num_shards = 2 "):
        assert line in result.stdout
    result = CliRunner().invoke(app, [*command, "--layout=4x2"])
    assert "num_workers = 8 " in result.stdout
    assert "num_shards = 1 " in result.stdout


DATA: Final = ["--set", "data.path=."]
SHARDS: Final = ["--set", "pipeline.num_shards=2"]


@pytest.mark.parametrize(
    ("recipe", "num_gpus", "more", "expected", "said"),
    [
        ("digits-vit", 1, [], (1, 1), "the layout is 1x1; --workers 2, the recipe's"),
        ("digits-vit", 2, [], (2, 1), ""),
        ("cifar10-resnext", 5, DATA, (4, 2), "the layout is 2x2; --workers 8"),
        ("digits-vit", 1, ["--workers=2"], (2, 1), "2 workers share 1 of them"),
        ("digits-vit", 0, [], (2, 1), ""),
        ("digits-vit", 1, SHARDS, (1, 1), "the layout is 1x1; --workers 2"),
    ],
)
def test_as_many_workers_as_there_are_gpus(
    recipe: str,
    num_gpus: int,
    more: list[str],
    expected: tuple[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with one GPU the main job was refused: the recipe says 2 workers."""
    name = env.BACKEND.name
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr("hocket.cuda.num_devices", lambda: num_gpus)
    started: list[Any] = []
    monkeypatch.setattr(train, "start_workers", lambda *args: started.append(args[0]))

    result = CliRunner().invoke(app, ["train", recipe, *more])

    assert not result.exit_code, result.stderr
    pipeline = started[0].recipe.pipeline
    assert (pipeline.num_workers, pipeline.num_replicas) == expected
    assert said in result.stderr
    assert bool(result.stderr) == bool(said)
    assert env.BACKEND.text() == ("gloo" if "--workers=2" in more else "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit-vit"], "did you mean 'digits-vit'?"),
        (["digits-vit", "--set", "training.num_epoch=3"], "did you mean 'num_epochs'?"),
        (["text-gpt"], "--set data.path="),
        (["text-gpt", "--set", "data.path=no.txt"], "no.txt does not exist"),
        (["digits-vit", "--run-dir=full"], "full is not empty"),
        (["digits-vit", "--resume=auto"], "name it with --run-dir"),
        (["digits-vit", "--run-dir=full", "--resume=auto"], "full is not empty"),
        (["cifar10-vit", "--set", "data.path=absent"], "absent does not exist"),
    ],
)
def test_what_is_not_valid_starts_nothing(
    free_dir: Path, arguments: list[str], message: str
) -> None:
    """Exit code 2, the reason and the way out, and no folder left behind."""
    (free_dir / "full").mkdir()
    (free_dir / "full" / "thesis.tex").write_text("precious")
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == ExitCode.USAGE
    assert message in result.stderr
    assert [path.name for path in free_dir.rglob("*")] == ["full", "thesis.tex"]


def test_a_recipe_that_reaches_out_is_allowed_by_hand(free_dir: Path) -> None:
    """On the command line, and only there."""
    (free_dir / "text.txt").write_text("To be, or not to be: " * 100)
    (free_dir / "sent").mkdir()
    recipe = free_dir / "sent" / "mine.toml"
    recipe.write_text(
        '[model]\nkind = "function"\nfunction = "examples.zoo.text:gpt"\n'
        '[data]\nkind = "function"\nfunction = "examples.zoo.text:windows"\n'
        'path = "../text.txt"\nwindow_bytes = 8\n'
        '[task]\nloss = "examples.zoo.text:loss"\n[optimizer]\nkind = "adamw"\n'
    )
    arguments = ["train", str(recipe), "--dry-run", "--set", "training.batch_size=8"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == ExitCode.USAGE
    assert "--allow-outside" in refused.stderr
    allowed = CliRunner().invoke(app, [*arguments, "--allow-outside"])
    assert allowed.exit_code == ExitCode.OK
    assert f'path = "{free_dir}/text.txt"' in allowed.stdout


KILLER: Final = """
import os
from pathlib import Path


class Killer:
    def __init__(self, run_dir):
        self.mark = Path(run_dir) / "killed"

    def step(self, record):
        if record.step == 4 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), 9)

    def evaluation(self, record):
        pass

    def summary(self, record):
        pass

    def close(self):
        pass
"""


@pytest.mark.timeout(420)  # it starts the workers twice
def test_a_killed_worker_is_replaced_and_the_run_goes_on(free_dir: Path) -> None:
    """From the last checkpoint, by itself; each step is written down once.

    A callback of the user's own kills the main worker, in the middle of its run. It is
    the only one: what a kill does to others is in tests/run/cluster/test_restart.py.
    """
    (free_dir / "killer.py").write_text(KILLER)
    more = (
        "pipeline.num_workers=1",
        "training.max_steps=7",
        "checkpoint.every_steps=2",
        'run.callbacks=["killer:Killer"]',
    )
    done = hocket_forked(
        "train",
        "digits-vit",
        "--run-dir=mine",
        "--max-restarts=1",
        *settings(*SMALL, *more),
        cwd=free_dir,
        timeout_s=2 * RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "goes on from" in done.stdout
    steps = [
        record for record in records(free_dir / "mine") if record["kind"] == "step"
    ]
    assert [step["step"] for step in steps] == list(range(7))
    *_, summary = records(free_dir / "mine")
    assert summary["num_samples"] == 7 * 64


@pytest.mark.timeout(220)
def test_an_error_in_the_workers_is_reported_once(free_dir: Path) -> None:
    """What only they can see: its message is on top, its exit code is the command's."""
    done = hocket_forked(
        "train",
        "digits-vit",
        *settings("training.batch_size=2000"),
        cwd=free_dir,
        timeout_s=RUN_TIMEOUT_S,
    )
    assert done.returncode == ExitCode.USAGE
    assert "1347 samples to train on do not fill one batch of 2000" in done.stderr
    assert "Traceback" not in done.stderr
