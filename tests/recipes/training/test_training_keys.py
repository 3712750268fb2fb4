"""Each key of training reaches what it is about: a run with it is another run.

That clipping, accumulation, precision and averages are right is tested where they are
(`tests/run`); here, that a recipe's words lead there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.run_folder import enter_folder
from hocket.recipes.training.train import train_recipe
from hocket.run.engine.sync.step_result import StepResult

SMALL: Final = (
    "model.width=16",
    "model.num_heads=2",
    "model.num_blocks=1",
    "model.mlp_width=16",
    "training.batch_size=100",
    "training.max_steps=4",
    "training.num_epochs=1",
    "training.evaluate_every_epochs=",
    "optimizer.kind=sgd",
    "optimizer.learning_rate=0.5",
    "optimizer.num_warmup_steps=",
    "optimizer.weight_decay=",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=2",
    "run.profile_folder=profiles",
)


@pytest.fixture(scope="module")
def module_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs, so that the model is profiled once."""
    return tmp_path_factory.mktemp("runs")


class Runs:
    """Trains a small recipe with some keys set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def __call__(self, *settings: str) -> list[dict[str, Any]]:
        """What the run has written down."""
        if settings not in self._kept:
            recipe = resolve("digits-vit", [*SMALL, *settings])
            folder, lock = enter_folder(recipe, self._folder / str(len(self._kept)))
            train_recipe(recipe.recipe, folder)
            lock.release()
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            self._kept[settings] = [json.loads(line) for line in lines]
        return self._kept[settings]

    def losses(self, *settings: str) -> list[float]:
        """Of each step."""
        return [r["loss"] for r in self(*settings) if r["kind"] == "step"]


@pytest.fixture(scope="module")
def runs(module_dir: Path) -> Runs:
    """Remembers what was trained already."""
    return Runs(module_dir)


@pytest.fixture(autouse=True)
def _there(module_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs in one folder."""
    monkeypatch.chdir(module_dir)


def test_accumulate_takes_more_batches_per_step(runs: Runs) -> None:
    """Twice the samples, and half the steps of an epoch."""
    steps = [r for r in runs("training.accumulate=2") if r["kind"] == "step"]
    assert [step["num_samples"] for step in steps] == [200] * 4
    more = runs("training.accumulate=5", "training.max_steps=100")
    assert len([r for r in more if r["kind"] == "step"]) == 13 // 5


def test_clip_norm_holds_the_weights(runs: Runs) -> None:
    """A tiny one leaves the model nearly as it began; the norm is reported whole."""
    free, held = runs.losses(), runs.losses("training.clip_norm=1e-6")
    kept = runs.losses("optimizer.learning_rate=1e-9")
    assert held == pytest.approx(kept, rel=1e-4)
    assert free[1:] != pytest.approx(kept[1:], rel=1e-2)
    norms = [r["grad_norm"] for r in runs("training.clip_norm=1e-6") if "step" in r]
    assert min(norms) > 1e-3


def test_the_norm_of_the_newest_step_is_not_waited_for(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps overlap, a norm is read when the next step's result has come."""
    come: list[int] = []
    asked: list[tuple[int, int]] = []

    class Seen(StepResult):
        """One that records when it is made, and when it is called."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            come.append(self.step)

        @property
        def grad_norm(self) -> float:
            asked.append((self.step, come[-1]))
            return self.gradient_status.value.norm

    monkeypatch.setattr("hocket.run.engine.driver.StepResult", Seen)
    runs("optimizer.learning_rate=0.4", "pipeline.schedule=wpipe")
    assert [step for step, _ in asked] == [0, 1, 2, 3]
    assert all(newest > step for step, newest in asked[:-1]), asked


def test_precision_rounds_the_forward(runs: Runs) -> None:
    """A little, and not nothing."""
    exact, rounded = runs.losses(), runs.losses("training.precision=bfloat16")
    assert rounded[0] == pytest.approx(exact[0], rel=0.02)
    assert rounded[0] != exact[0]


def test_evaluation_uses_the_averages(runs: Runs) -> None:
    """Those that hardly move are as good as the model at its beginning."""
    (evaluated,) = [
        r for r in runs("training.ema_decay=0.999999") if r["kind"] == "evaluation"
    ]
    first = runs("training.ema_decay=0.999999", "optimizer.learning_rate=1e-9")
    (unmoved,) = [r for r in first if r["kind"] == "evaluation"]
    (trained,) = [r for r in runs() if r["kind"] == "evaluation"]
    assert evaluated["loss"] == pytest.approx(unmoved["loss"], rel=1e-3)
    assert evaluated["loss"] != pytest.approx(trained["loss"], rel=1e-3)


def test_evaluation_every_so_many_steps(runs: Runs) -> None:
    """And after the last one."""
    records = runs("training.evaluate_every_steps=3")
    at = [r["num_steps"] for r in records if r["kind"] == "evaluation"]
    assert at == [3, 4]


@pytest.mark.parametrize(
    "setting", ["pipeline.recompute=all", "pipeline.schedule=auto"]
)
def test_the_order_of_work_changes_nothing_that_is_learned(
    runs: Runs, setting: str
) -> None:
    """Recomputation, and whatever order the planner takes: the same losses."""
    assert runs.losses(setting) == pytest.approx(runs.losses(), rel=1e-6)


def test_the_learning_rate_falls_as_asked(runs: Runs) -> None:
    """Along a line: equal steps down."""
    records = runs("optimizer.fall=linear")
    rates = [r["learning_rate"] for r in records if r["kind"] == "step"]
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_batches_that_are_read_ahead_are_the_same(runs: Runs) -> None:
    """By another process."""
    assert runs.losses("training.num_loaders=1") == runs.losses()
