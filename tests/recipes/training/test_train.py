"""A recipe trained in this process: the numbers of a plain loop, and all files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hocket.errors import CallbackError
from hocket.model.profile.profile import Profile
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.objectives import class_metrics
from hocket.recipes.run_files import METRICS_NAME
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.records import StepRecord, Watcher
from hocket.recipes.training.run_folder import claim_folder
from hocket.recipes.training.task import make_task
from hocket.recipes.training.train import main, profile, train_recipe
from hocket.run.checkpoint.format.newest import newest
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.sample_loader import EvaluationLoader

SMALL: Final = (
    "model.width=16",
    "model.num_heads=2",
    "model.num_blocks=1",
    "model.mlp_width=16",
    "training.batch_size=30",
    "training.num_epochs=1",
    "training.max_steps=5",
    "optimizer.num_warmup_steps=2",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=4",
)


def run_folder(folder: Path, name: str, *settings: str) -> tuple[Path, Recipe]:
    """The folder of a small run that may begin, and its recipe."""
    profiles = f"run.profile_folder={folder / 'profiles'}"
    resolved = resolve(name, [*SMALL, profiles, *settings])
    return claim_folder(folder / "run", resolved.to_toml()), resolved.recipe


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds."""
    return [
        json.loads(line) for line in (run_dir / METRICS_NAME).read_text().splitlines()
    ]


def plain_loop(recipe: Recipe) -> tuple[list[float], float]:
    """The losses of each step, and the accuracy at the end, without a pipeline."""
    task = make_task(recipe)
    model = task.make_model()
    optimizer = make_optimizer(recipe.optimizer)(model.parameters())
    scheduler = make_scheduler(task.learning_rate_share)(optimizer)
    losses = []
    for inputs, targets in task.loader():
        loss = named_losses(task.loss(model(inputs), targets))[TOTAL]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        ((inputs, targets),) = EvaluationLoader(task.evaluation, 1000)
        output = model.eval()(inputs)
    return losses, float(class_metrics(output, targets)["accuracy"])


def test_a_recipe_trains_as_a_plain_loop(tmp_path: Path) -> None:
    """Same batches, shifts, weights, learning rates: same losses, up to rounding."""
    run_dir, recipe = run_folder(tmp_path, "digits-vit")
    evaluation = train_recipe(recipe, run_dir)
    expected, expected_accuracy = plain_loop(recipe)

    steps = [x for x in records(run_dir) if x["kind"] == "step"]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-4)
    assert evaluation.metrics["accuracy"] == pytest.approx(expected_accuracy, abs=0.01)
    assert evaluation.num_samples == 450


def test_records_say_the_learning_rate_that_was_used(tmp_path: Path) -> None:
    """The recipe's own schedule: up to the highest in two steps, then down."""
    run_dir, recipe = run_folder(tmp_path, "digits-vit")
    train_recipe(recipe, run_dir)
    rates = [r["learning_rate"] for r in records(run_dir) if r["kind"] == "step"]
    highest = recipe.optimizer.learning_rate
    assert rates[:3] == pytest.approx([highest / 3, 2 * highest / 3, highest])
    assert rates[2] > rates[3] > rates[4] > 0


def test_text_gpt_says_its_bits_per_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a text; the console shows where the report is."""
    (tmp_path / "text.txt").write_text("To be, or not to be: " * 60)
    run_dir, _ = run_folder(
        tmp_path,
        "text-gpt",
        f"data.path={tmp_path / 'text.txt'}",
        "data.window_bytes=12",
    )
    result = main(str(run_dir))

    assert set(result) == {"loss", "bits_per_byte", "accuracy"}
    assert 0 < result["bits_per_byte"] < 9
    assert f"report: {run_dir / 'report.html'}" in capsys.readouterr().out


def test_a_profile_is_measured_once(tmp_path: Path) -> None:
    """Kept and found again, by profiling and by training; measured anew when asked."""
    run_dir, recipe = run_folder(tmp_path, "digits-vit")
    fresh, kept = (profile(str(run_dir), is_again=False) for _ in range(2))
    path = Path(fresh["path"])
    written_ns = path.stat().st_mtime_ns
    train_recipe(recipe, run_dir)

    assert (fresh["was_kept"], kept["was_kept"]) == (False, True)
    assert fresh["profile"] == kept["profile"] == Profile.load(path).to_json()
    assert path.stat().st_mtime_ns == written_ns
    again = profile(str(run_dir), is_again=True)
    assert not again["was_kept"]
    assert again["path"] == fresh["path"]
    assert Profile.load(path).to_json() == again["profile"]
    assert path.stat().st_mtime_ns > written_ns


def test_a_watcher_that_fails_loses_nothing(tmp_path: Path) -> None:
    """Training ends, its weights are kept, and then the error is raised."""
    folder, recipe = run_folder(tmp_path, "digits-vit")
    watcher = FullDisk()
    with pytest.raises(
        CallbackError, match=r"rank 0: FullDisk\.step at step 0 failed: "
    ):
        train_recipe(recipe, folder, watchers=[watcher])
    assert watcher.num_calls == 1
    assert newest(folder / "checkpoints") is not None


class FullDisk(Watcher):
    """Fails at its first step."""

    num_calls = 0

    def step(self, record: StepRecord) -> None:
        """Fail."""
        self.num_calls += 1
        raise OSError("no space left on device")
