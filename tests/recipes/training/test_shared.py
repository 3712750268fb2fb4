"""Recipes that share a device leave what `hocket train` leaves, and go on from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from typer.testing import CliRunner

import hocket
from hocket.cli.main import app
from hocket.recipes.config.resolve import resolve
from hocket.recipes.run_files import CHECKPOINTS_NAME, RECIPE_NAME
from hocket.recipes.training.run_folder import claim_folder
from hocket.recipes.training.shared import recipe_job
from hocket.recipes.training.train import train_recipe
from hocket.run.checkpoint.format.durable import FolderLock
from hocket.run.checkpoint.format.folder import saved
from tests.recipes.support.interrupted import SMALL, last_weights, records, same
from tests.run.support.processes import eventually

JOBS: Final = ("digits-vit-1", "digits-vit-2")
BREAKS_OFF: Final = (
    'run.callbacks=["tests.recipes.support.interrupted:ends_after_step_3"]'
)


def arguments(folder: Path, *settings: str) -> list[str]:
    """Those of `hocket share`, for two small runs in this folder."""
    own = [x for text in (*SMALL, *settings) for x in ("--set", text)]
    recipes = ["digits-vit", "digits-vit", "--run-dir", str(folder)]
    return ["share", *recipes, "--device", "cpu", *own]


def share(folder: Path, *settings: str, options: tuple[str, ...] = ()) -> str:
    """What `hocket share` prints."""
    done = CliRunner().invoke(app, [*arguments(folder, *settings), *options])
    return f"{done.output}{done.exception or ''}"


@pytest.fixture(scope="module", name="whole")
def train_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that were not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    out = share(folder, options=("--mode", "turns"))
    assert "digits-vit-2: last loss" in out
    return folder


def test_leaves_the_files_of_a_run(whole: Path) -> None:
    """Metrics of steps and evaluations, checkpoints by every step that is due."""
    one, other = (whole / name for name in JOBS)
    assert (one / RECIPE_NAME).is_file()
    assert [step["step"] for step in records(one, "step")] == list(range(6))
    assert records(one, "step") == records(other, "step")
    assert [x["num_steps"] for x in records(one, "evaluation")] == [3, 6]
    (summary,) = records(one, "summary")
    assert summary["num_samples"] == 6 * 4 * 200
    names = [path.name for path in saved(one / CHECKPOINTS_NAME)]
    assert names == ["step-00000002", "step-00000004", "step-00000006"]
    assert same(last_weights(one), last_weights(other))


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    whole: Path, tmp_path: Path
) -> None:
    """Losses, evaluations, weights, optimizer and averages: all the same, bit for bit.

    In the middle of an epoch, with dropout, clipping and accumulation. Another mode
    makes no difference, and a run that has ended goes on to nothing.
    """
    out = share(tmp_path, BREAKS_OFF, options=("--mode", "lag"))
    assert "InterruptedRunError" in out
    share(tmp_path, options=("--mode", "lag", "--resume", "auto"))
    for name in JOBS:
        for kind in ("step", "evaluation"):
            assert records(tmp_path / name, kind) == records(whole / name, kind)
        assert same(last_weights(tmp_path / name), last_weights(whole / name))
    again = share(tmp_path, options=("--mode", "lag", "--resume", "auto"))
    assert "last loss" not in again
    assert all(len(records(tmp_path / name, "step")) == 6 for name in JOBS)


@pytest.mark.parametrize("shares_first", [True, False])
def test_train_and_share_go_on_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shares_first: bool
) -> None:
    """Without dropout, and with one microbatch, they do the same but for rounding."""
    monkeypatch.chdir(tmp_path)
    same_sums = ("model.dropout=0.0", "pipeline.num_microbatches=1")

    def train(folder: Path, *settings: str) -> None:
        resolved = resolve("digits-vit", [*SMALL, *same_sums, *settings])
        claim_folder(folder, resolved.to_toml())
        train_recipe(resolved.recipe, folder)

    def share_two(folder: Path, *settings: str) -> None:
        assert "last loss" in share(folder.parent, *same_sums, *settings)

    first, then = (share_two, train) if shares_first else (train, share_two)
    begun, ended = tmp_path / "begun" / JOBS[0], tmp_path / "ended" / JOBS[0]
    first(begun)
    last = begun / CHECKPOINTS_NAME / "step-00000004"
    then(ended, f"checkpoint.resume={last}")
    assert [step["step"] for step in records(ended, "step")] == [4, 5]
    for name, x in last_weights(ended).items():
        torch.testing.assert_close(
            x, last_weights(begun)[name], rtol=2e-3, atol=2e-4, msg=name
        )


def share_recipe(folder: Path, num_jobs: int) -> hocket.ShareReport:
    """The report of equal runs in turns, which accumulate and evaluate."""
    jobs = []
    for i in range(num_jobs):
        own = folder / str(i)
        resolved = resolve("digits-vit", [*SMALL, "training.num_epochs=40"])
        claim_folder(own, resolved.to_toml())
        jobs.append(
            recipe_job(
                resolved.recipe,
                own,
                hocket.Job(str(i), lambda _: ((lambda _: None), ())),
            )
        )
    report = hocket.share(jobs, mode="turns", device="cpu")
    report.check()
    return report


def test_the_speed_of_recipes_that_evaluate_and_accumulate(tmp_path: Path) -> None:
    """Alone it is 1, and that of two equal ones in turns is about 1 together.

    Past bug: 0.45 and 0.15. The shortest iteration that ran alone was that of a small
    evaluation batch, or of a batch without an update.
    """
    (alone,) = share_recipe(tmp_path / "one", 1).jobs
    assert alone.speed == pytest.approx(1.0, rel=0.1)
    assert alone.alone_s.keys() == {"", "update", "evaluation"}
    two = share_recipe(tmp_path / "two", 2)
    assert two.total_speed == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--mode", "ticktock"), "did you mean 'tick-tock'"),
        (("--weights", "1,0"), "weight=0.0"),
        (("--mode", "lag", "--weights", "2,1"), "have no effect"),
        (("--memory", "20GB"), "is no size"),
        (("--memory", "0"), "memory_bytes=0 is no number of bytes above 0"),
        (("--device", "banana"), "device 'banana': jobs share a GPU"),
    ],
)
def test_a_refused_share_takes_no_folder(
    tmp_path: Path, wrong: tuple[str, ...], message: str
) -> None:
    """Past bug: the same command without the fault found a folder that was not empty.

    Also where the second run's folder is the one that cannot be used.
    """
    out = share(tmp_path / "both", options=wrong).replace("\n", " ")
    assert message in out
    assert not (tmp_path / "both").exists()
    used = tmp_path / "both" / JOBS[1] / "kept.txt"
    used.parent.mkdir(parents=True)
    used.touch()
    assert "is not empty" in share(tmp_path / "both")
    assert not (tmp_path / "both" / JOBS[0]).exists()


def test_refuses_a_folder_that_is_in_use(whole: Path) -> None:
    """By another run, or by a run's files; and to resume without a folder."""
    lock = FolderLock(whole / JOBS[1])
    assert "belongs to another run that saves there" in share(
        whole, options=("--resume", "auto")
    )
    lock.release()
    assert "is not empty" in share(whole)
    without = ["share", "digits-vit", "--device", "cpu", "--resume", "auto"]
    done = CliRunner().invoke(app, without)
    assert "name it with --run-dir" in done.output.replace("\n", " ")


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("processes", [True, False])
def test_a_killed_share_goes_on(
    whole: Path, tmp_path: Path, *, processes: bool
) -> None:
    """Whenever it is killed; with `--processes`, its jobs end with it."""
    own = ["--processes"] if processes else []
    path = os.pathsep.join(x or os.getcwd() for x in sys.path)
    command = [sys.executable, "-m", "hocket", *arguments(tmp_path), *own]
    running = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    first = tmp_path / JOBS[0] / CHECKPOINTS_NAME / "latest"
    assert eventually(first.exists, 200.0)
    running.send_signal(signal.SIGKILL)
    running.wait(60)

    def goes_on() -> bool:
        out = share(tmp_path, options=(*own, "--resume", "auto"))
        return "belongs to another run" not in out  # a job that has not yet ended

    assert eventually(goes_on, 100.0)
    for name in JOBS:
        assert records(tmp_path / name, "step") == records(whole / name, "step")
        assert same(last_weights(tmp_path / name), last_weights(whole / name))
