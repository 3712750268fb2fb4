"""WPipe's experiments as recipes: their published sizes, and each in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hocket.cli.train import ENTRY
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.config.sections import ModelFunctionSettings
from hocket.recipes.training.run_folder import enter_folder
from hocket.recipes.training.task import make_task
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.sample_loader import SampleLoader
from tests.recipes.models.test_kinds import mnli, table
from tests.recipes.support.cifar_folder import cifar10, cifar100
from tests.recipes.support.flowers_folder import flowers
from tests.run.support.forked import answers_of

pytest.importorskip("torchvision", reason="extra `vision`")

RUN_TIMEOUT_S: Final = 200.0  # a tenth of it on free cores
BATCH: Final = 8
IMAGES: Final = (
    "model.depth=14",
    "model.num_groups=2",
    "model.group_width=4",
    "data.side=32",
)
SENTENCES: Final = (
    "model.width=8",
    "model.num_blocks=4",
    "model.num_heads=2",
    "model.mlp_width=16",
    "data.num_tokens=16",
)
SMALL: Final = (
    f"training.batch_size={BATCH}",
    "training.max_steps=3",
    "training.num_loaders=0",
    "optimizer.num_warmup_steps=0",
    "checkpoint.every_epochs=",
    "checkpoint.every_steps=3",
    "pipeline.layout=2x1",
    "pipeline.num_microbatches=2",
)


def qqp(folder: Path) -> None:
    """Two questions, and whether they mean the same."""
    words = ("who is it", "who was it", "what is it", "where is it")
    header = "question1\tquestion2\tis_duplicate"
    table(folder, header, lambda i: f"{words[i % 4]}\t{words[i % 3]}\t{i % 2}")


@dataclass(frozen=True, slots=True)
class Published:
    """What the paper's scripts say of a recipe.

    Args:
        layout: of 8 GPUs.
        num_epochs: of training.
        num_classes: the number of classes.
        settings: that make the model small.
        write: a small folder of the data's form.
    """

    layout: str
    num_epochs: int
    num_classes: int
    settings: tuple[str, ...]
    write: Callable[[Path], Any]


RECIPES: Final = {
    "cifar10-resnext": Published("2x4", 35, 10, IMAGES, lambda x: cifar10(x, 8)),
    "cifar100-resnext": Published("2x4", 35, 100, IMAGES, lambda x: cifar100(x, 32)),
    "flowers102-resnext": Published("2x4", 95, 102, IMAGES, flowers),
    "qqp-bert": Published("4x2", 15, 2, SENTENCES, qqp),
    "mnli-bert": Published("4x2", 15, 3, SENTENCES, mnli),
}


def small(name: str, folder: Path) -> tuple[str, ...]:
    """The settings that make a recipe small, with its data in a folder."""
    published = RECIPES[name]
    folder.mkdir()
    published.write(folder)
    return (f"data.path={folder}", *SMALL, *published.settings)


def full(name: str, *settings: str) -> Recipe:
    """As it comes."""
    return resolve(name, ["data.path=any", *settings]).recipe


@pytest.mark.parametrize("name", RECIPES)
def test_is_of_the_published_size(name: str) -> None:
    """8 workers in the scripts' layout, without a flush; 32 samples per worker."""
    recipe, published = full(name), RECIPES[name]
    pipeline = recipe.pipeline

    assert (pipeline.layout, pipeline.schedule) == (published.layout, "wpipe")
    assert pipeline.num_workers == 8
    assert recipe.training.num_epochs == published.num_epochs
    assert recipe.training.batch_size == 32 * pipeline.num_workers
    assert pipeline.num_microbatches == pipeline.num_workers // pipeline.num_replicas
    assert not recipe.checkpoint.is_off


@pytest.mark.parametrize("name", RECIPES)
def test_another_schedule_is_one_word(name: str) -> None:
    """2BW, data parallelism and 1F1B to compare with."""
    two_bw = full(name, "pipeline.schedule=pipedream-2bw")
    assert two_bw.pipeline.schedule == "pipedream-2bw"
    plain = full(name, "pipeline.schedule=1f1b", "pipeline.layout=1x8")
    assert (plain.pipeline.num_workers, plain.pipeline.num_replicas) == (8, 8)


def test_depth_is_one_number() -> None:
    """The published ones, of both kinds."""
    for depth in (50, 101, 200, 302, 500, 800):
        model = full("cifar10-resnext", f"model.depth={depth}").model
        assert isinstance(model, ModelFunctionSettings)
        assert model.arguments["depth"] == depth
    for depth in (24, 48, 96, 192, 384, 768):
        bert = full("qqp-bert", f"model.num_blocks={depth}").model
        assert isinstance(bert, ModelFunctionSettings)
        assert bert.arguments["num_blocks"] == depth


@pytest.mark.parametrize("name", RECIPES)
def test_model_and_data_fit_together(name: str, tmp_path: Path) -> None:
    """A batch goes through and back, with a score for each class."""
    recipe = resolve(name, small(name, tmp_path / "data")).recipe
    task = make_task(recipe)
    inputs, targets = SampleLoader(task.training, BATCH).example()
    model = task.make_model()
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    named_losses(task.loss(output, targets))[TOTAL].backward()
    scores = output["logits"] if isinstance(output, dict) else output

    assert scores.shape == (BATCH, RECIPES[name].num_classes)
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    assert task.metrics is not None
    assert torch.isfinite(task.metrics(output, targets)["accuracy"])


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("cifar10-resnext", marks=pytest.mark.long),
        pytest.param("cifar100-resnext", marks=pytest.mark.long),
        pytest.param("flowers102-resnext", marks=pytest.mark.long),
        pytest.param("qqp-bert", marks=pytest.mark.long),
        pytest.param("mnli-bert", marks=pytest.mark.long),
    ],
)
def test_trains_on_two_workers_without_a_flush(name: str, tmp_path: Path) -> None:
    """A few steps, an evaluation and a checkpoint, as `hocket train` would."""
    settings = (
        *small(name, tmp_path / "data"),
        f"run.profile_folder={tmp_path / 'profiles'}",
    )
    run_dir, lock = enter_folder(resolve(name, settings), tmp_path / "run")
    answers_of(ENTRY, str(run_dir), folder=tmp_path, whole_s=RUN_TIMEOUT_S)
    lock.release()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    evaluation, summary = records[-2:]

    assert steps == [0, 1, 2]
    assert (evaluation["kind"], summary["kind"]) == ("evaluation", "summary")
    assert 0 <= evaluation["accuracy"] == summary["accuracy"] <= 1
    assert list((run_dir / "checkpoints").glob("step-*"))
