"""A run that was interrupted ends as one that was not; none begins anew unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest

from hocket.errors import CheckpointError, DataError, RecipeError
from hocket.recipes.config.resolve import Resolved, resolve
from hocket.recipes.run_files import CHECKPOINTS_NAME
from hocket.recipes.training.run_folder import enter_folder, resume_point
from hocket.recipes.training.train import train_recipe
from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.folder import LATEST, saved
from tests.recipes.support.interrupted import (
    SMALL,
    InterruptedRunError,
    Interrupter,
    last_weights,
    records,
    same,
)
from tests.run.support.exported_once import export_once
from tests.run.support.short_measurements import measure_shortly


def resolved(*settings: str) -> Resolved:
    """A small recipe."""
    return resolve("digits-vit", [*SMALL, *settings])


def train(run_dir: Path, recipe: Resolved, last_step: int | None = None) -> None:
    """Train in this process, to the end or until a step after which all breaks off."""
    folder, lock = enter_folder(recipe, run_dir)
    try:
        if last_step is None:
            train_recipe(recipe.recipe, folder)
        else:
            with pytest.raises(InterruptedRunError):
                train_recipe(recipe.recipe, folder, watchers=[Interrupter(last_step)])
    finally:
        lock.release()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs to go on with: `whole`, and `begun`, which broke off after step 3."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        measure_shortly(patch)
        export_once(patch)
        train(folder / "whole", resolved())
        train(folder / "begun", resolved("checkpoint.background=false"), 3)
    return folder


@pytest.fixture
def runs_dir(trained: Path, free_dir: Path) -> Path:
    """A folder of the test's own with copies of both runs; the current directory."""
    shutil.copytree(trained, free_dir, dirs_exist_ok=True)
    return free_dir


@pytest.mark.parametrize("last_step", [1, 2, 4])
def test_an_interrupted_run_ends_as_if_it_had_not_been(
    runs_dir: Path, last_step: int
) -> None:
    """Losses, evaluations, weights, optimizer and averages: all the same, bit for bit.

    In the middle of an epoch too, with dropout, shifts, clipping and accumulation.
    """
    whole, parts = runs_dir / "whole", runs_dir / "parts"
    train(parts, resolved(), last_step)
    train(parts, resolved("checkpoint.resume=auto"))

    steps = records(parts, "step")
    assert [step["step"] for step in steps] == list(range(6))
    assert steps == records(whole, "step")
    assert records(parts, "evaluation") == records(whole, "evaluation")
    (summary,) = records(parts, "summary")
    assert summary["num_samples"] == 6 * 4 * 200
    assert same(last_weights(whole), last_weights(parts))
    page = (parts / "report.html").read_text()
    assert all(json.dumps(step["loss"]) in page for step in steps)


FLUSH_FREE: Final = (
    "pipeline.schedule=wpipe",
    "pipeline.cut=",
    "training.accumulate=1",
    "training.max_steps=11",
    "training.evaluate_every_steps=4",
    "checkpoint.every_steps=4",
)


def test_an_interrupted_run_without_flushes(free_dir: Path) -> None:
    """Several steps are under way when it breaks off; none is repeated or left out."""
    whole, parts = free_dir / "whole", free_dir / "parts"
    train(whole, resolved(*FLUSH_FREE))
    train(parts, resolved(*FLUSH_FREE), last_step=5)
    names = [path.name for path in saved(parts / CHECKPOINTS_NAME)]
    assert names == ["step-00000004"]
    train(parts, resolved(*FLUSH_FREE, "checkpoint.resume=auto"))

    steps = records(parts, "step")
    assert [step["step"] for step in steps] == list(range(11))
    assert steps == records(whole, "step")
    evaluations = records(parts, "evaluation")
    assert [each["num_steps"] for each in evaluations] == [4, 8, 11]
    assert evaluations == records(whole, "evaluation")
    assert same(last_weights(whole), last_weights(parts))


def test_stops_exactly_at_an_evaluation_without_flushes(free_dir: Path) -> None:
    """No step behind it is begun, and the place in the data is the one saved."""
    settings = ("training.stop_patience=1", "optimizer.learning_rate=1e-30")
    train(free_dir / "run", resolved(*FLUSH_FREE, *settings))
    assert len(records(free_dir / "run", "step")) == 8
    (newest,) = saved(free_dir / "run" / CHECKPOINTS_NAME)[-1:]
    run = open_one(newest).manifest.run
    assert run.step == 8
    assert run.data["loader"]["num_batches"] == 8


def test_another_run_may_begin_at_a_checkpoint(runs_dir: Path) -> None:
    """In a folder of its own; named by the run's folder, or by the checkpoint's."""
    (newest,) = saved(runs_dir / "begun" / CHECKPOINTS_NAME)[-1:]
    train(runs_dir / "second", resolved("checkpoint.resume=begun"))
    train(runs_dir / "third", resolved(f"checkpoint.resume={newest}"))

    for name in ("second", "third"):
        steps = [step["step"] for step in records(runs_dir / name, "step")]
        assert steps == [2, 3, 4, 5]


def test_nothing_is_left_to_train(runs_dir: Path) -> None:
    """A run that goes on at its end says how good it is, and trains no step more."""
    run = runs_dir / "whole"
    before = records(run, "evaluation")
    (run / "report.html").unlink()
    train(run, resolved("checkpoint.resume=auto"))

    assert len(records(run, "step")) == 6
    after = records(run, "evaluation")
    assert after[-1]["loss"] == before[-1]["loss"]
    assert (run / "report.html").exists()


def test_auto_begins_anew_where_nothing_was_saved(
    free_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so; a folder that is not there yet is made."""
    train(free_dir / "run", resolved("checkpoint.resume=auto", "training.max_steps=1"))
    assert "no checkpoint in" in capsys.readouterr().out
    assert len(records(free_dir / "run", "step")) == 1


def test_auto_resumes_where_the_pointer_is_lost(runs_dir: Path) -> None:
    """Training anew would remove the checkpoints of the run beside it."""
    run = runs_dir / "begun"
    folder = run / CHECKPOINTS_NAME
    before = saved(folder)
    (folder / LATEST).unlink()
    train(run, resolved("checkpoint.resume=auto"))
    steps = [step["step"] for step in records(run, "step")]
    assert steps == list(range(6))
    assert before[-1] in saved(folder)


def test_what_was_asked_for_must_be_there(free_dir: Path) -> None:
    """A missing checkpoint is an error, never a fresh start."""
    recipe = resolved("checkpoint.resume=absent")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*absent"):
        resume_point(free_dir, recipe.recipe.checkpoint, is_restart=False)
    with pytest.raises(RecipeError, match=r"name it with --run-dir"):
        enter_folder(resolved("checkpoint.resume=auto"), None)
    with pytest.raises(RecipeError, match=r"--run-dir"):
        enter_folder(resolved(), None, is_restart=True)


def test_a_restarted_run_prefers_its_own_checkpoints(runs_dir: Path) -> None:
    """To the one that it began with, which is older."""
    recipe = resolved("checkpoint.resume=begun")
    first = runs_dir / "begun" / CHECKPOINTS_NAME, "latest"
    run_dir = runs_dir / "second"

    def start(*, is_restart: bool) -> tuple[Path, int | str] | None:
        return resume_point(run_dir, recipe.recipe.checkpoint, is_restart=is_restart)

    assert start(is_restart=True) == start(is_restart=False) == first
    train(run_dir, recipe)
    assert start(is_restart=False) == first
    assert start(is_restart=True) == (run_dir / CHECKPOINTS_NAME, "latest")


def test_two_runs_never_share_a_folder(runs_dir: Path) -> None:
    """Not even when the second wants to go on: the first is still at work."""
    run = runs_dir / "begun"
    kept = (run / "recipe.toml").read_text()
    recipe = resolved("checkpoint.resume=auto")
    _, lock = enter_folder(recipe, run)
    changed = (run / "recipe.toml").read_text()
    other = resolved("checkpoint.resume=auto", "training.max_steps=1")
    with pytest.raises(CheckpointError, match="belongs to another run"):
        enter_folder(other, run)
    assert (run / "recipe.toml").read_text() == changed != kept
    lock.release()
    with pytest.raises(RecipeError, match="is not empty"):
        enter_folder(resolved(), run)


def test_going_on_in_another_order_is_refused(runs_dir: Path) -> None:
    """Another seed would repeat some samples and leave out others."""
    again = resolved("checkpoint.resume=auto", "training.seed=1")
    with pytest.raises(DataError, match="seed 0, and now it is 1"):
        train(runs_dir / "begun", again)


def test_the_newest_are_kept(free_dir: Path) -> None:
    """As many as asked for."""
    train(free_dir / "run", resolved("checkpoint.every_steps=1", "checkpoint.keep=2"))
    names = [path.name for path in saved(free_dir / "run" / CHECKPOINTS_NAME)]
    assert names == ["step-00000005", "step-00000006"]


def test_training_stops_when_nothing_gets_better(free_dir: Path) -> None:
    """A learning rate that ruins the model: the first evaluation stays the best."""
    settings = (
        "training.evaluate_every_steps=1",
        "training.stop_patience=2",
        "optimizer.learning_rate=1e-30",
        "optimizer.num_warmup_steps=0",
        "checkpoint.every_steps=100",
    )
    train(free_dir / "run", resolved(*settings))
    assert len(records(free_dir / "run", "step")) == 3
    (newest,) = saved(free_dir / "run" / CHECKPOINTS_NAME)
    assert newest.name == "step-00000003"


def test_a_metric_that_is_not_measured(free_dir: Path) -> None:
    """The ones that there are, at the first evaluation."""
    settings = ("training.stop_patience=2", "training.stop_metric=f1")
    with pytest.raises(DataError, match=r"stop by 'f1'.*'loss', 'accuracy'"):
        train(free_dir / "run", resolved(*settings))
