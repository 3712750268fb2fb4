"""The recipes for real data, each in a small size, trained on two workers.

The sizes are those of `docs/reference/recipes.md`, with fewer steps: what is learned in
them is more than guessing, and each takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Final

import pytest

from hocket.cli.train import ENTRY
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.run_folder import enter_folder
from hocket.recipes.training.task import check_data
from tests.recipes.support.real_data import real
from tests.run.support.forked import answers_of

RUN_TIMEOUT_S: Final = 200.0  # a tenth of it on free cores


@dataclass(frozen=True, slots=True)
class Small:
    """A recipe in a small size.

    Args:
        folder: of its data.
        settings: that make it small.
        num_evaluated: samples of the last evaluation.
        first_loss: what guessing costs, in nats.
    """

    folder: str
    settings: tuple[str, ...]
    num_evaluated: int
    first_loss: float


SMALL: Final[Mapping[str, Small]] = {
    "cifar10-resnet": Small(
        "cifar-10-batches-py",
        (
            "model.width=8",
            "model.num_blocks=1",
            "data.max_samples=512",
            "training.num_epochs=4",
            "training.batch_size=64",
            "optimizer.num_warmup_steps=4",
            "pipeline.num_microbatches=2",
        ),
        512,
        log(10),
    ),
    "cifar10-vit": Small(
        "cifar-10-batches-py",
        (
            "model.width=48",
            "model.num_blocks=3",
            "model.mlp_width=96",
            "model.patch_size=8",
            "data.max_samples=512",
            "training.num_epochs=4",
            "training.batch_size=64",
            "training.ema_decay=0.8",
            "optimizer.num_warmup_steps=4",
            "pipeline.num_microbatches=2",
        ),
        512,
        log(10),
    ),
    "mrpc-bert": Small(
        "mrpc",
        (
            "model.width=32",
            "model.num_blocks=2",
            "model.num_heads=2",
            "model.mlp_width=64",
            "data.num_tokens=48",
            "data.num_pieces=2000",
            "data.max_samples=192",
            "optimizer.learning_rate=1e-3",
            "optimizer.num_warmup_steps=4",
            "pipeline.num_microbatches=2",
        ),
        192,
        log(2),
    ),
}


def last_records(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last evaluation, and the summary."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    evaluation, summary = (json.loads(line) for line in lines[-2:])
    return evaluation, summary


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    "name",
    [
        # The data of cifar10-vit; a network of convolutions is slow on a CPU.
        pytest.param("cifar10-resnet", marks=pytest.mark.long),
        "cifar10-vit",
        pytest.param("mrpc-bert", marks=pytest.mark.long),
    ],
)
def test_learns_something_of_the_real_data(name: str, tmp_path: Path) -> None:
    """Its loss on data that it was not trained on is below that of guessing.

    On two workers, as `hocket train` starts them; that it does is tested in tests/cli.
    """
    small = SMALL[name]
    settings = (
        f"data.path={real(small.folder)}",
        f"run.profile_folder={tmp_path / 'profiles'}",
        *small.settings,
    )
    resolved = resolve(name, settings)
    check_data(resolved.recipe)
    run_dir, lock = enter_folder(resolved, tmp_path / "run")
    answers_of(ENTRY, str(run_dir), folder=tmp_path, whole_s=RUN_TIMEOUT_S)
    lock.release()
    evaluation, summary = last_records(run_dir)

    assert evaluation["num_samples"] == small.num_evaluated
    assert evaluation["loss"] < small.first_loss
    assert 0 < evaluation["accuracy"] == summary["accuracy"] <= 1
    assert list((run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("name", SMALL)
def test_is_as_large_as_it_says(name: str) -> None:
    """What is documented at full size cannot be tried here; its sizes can be read."""
    recipe = resolve(name, ["data.path=any"]).recipe
    assert recipe.training.batch_size >= 32
    assert recipe.pipeline.num_workers == 2
    assert not recipe.checkpoint.is_off
