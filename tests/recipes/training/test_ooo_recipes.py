"""Out-of-order backprop's networks as recipes: their sizes, and each in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hocket.cli.train import ENTRY
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.run_folder import enter_folder
from hocket.recipes.training.task import make_task
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.sample_loader import SampleLoader
from tests.recipes.models.test_kinds import image_folder
from tests.recipes.support.cifar_folder import cifar100
from tests.run.support.forked import answers_of

pytest.importorskip("torchvision", reason="extra `vision`")

RUN_TIMEOUT_S: Final = 200.0  # a tenth of it on free cores
BATCH: Final = 4
SMALL: Final = (
    f"training.batch_size={BATCH}",
    "training.max_steps=2",
    "training.num_loaders=0",
    "optimizer.num_warmup_steps=0",
    "checkpoint.every_epochs=",
    "checkpoint.every_steps=2",
)
ON_TWO: Final = ("pipeline.num_workers=2", "pipeline.num_microbatches=2")


def sentences(folder: Path) -> None:
    """A text of some lines."""
    (folder / "text.txt").write_text("der Hund sieht die Katze\n" * 40)


def cifar(folder: Path) -> None:
    """Some images of CIFAR-100's form."""
    cifar100(folder, 32)


@dataclass(frozen=True, slots=True)
class Published:
    """What a network of the paper has.

    Args:
        num_parameters: at its full size, with as many classes as its data have.
        batch_size: on all its devices.
        write: a small folder of the data's form.
        small: settings that make the model small.
        shape: of the small model's output.
    """

    num_parameters: int
    batch_size: int
    write: Callable[[Path], Any]
    small: tuple[str, ...]
    shape: tuple[int, ...]


RECIPES: Final = {
    # 7,978,856 with 1,000 classes, of which the head has 1,025 each
    "densenet121": Published(
        7_978_856 - 900 * 1025, 32, cifar, ("model.growth_rate=4",), (BATCH, 100)
    ),
    # 5,483,032 with 1,000 classes; the head has 1,281 for each of two
    "mobilenet-v3": Published(
        5_483_032 - 998 * 1281,
        32,
        image_folder,
        ("model.width_multiplier=0.25", "data.side=32"),
        (BATCH, 2),
    ),
    # 25,557,032 with 1,000 classes; the head has 2,049 for each of two
    "resnet50": Published(
        25_557_032 - 998 * 2049,
        128 * 4,
        image_folder,
        ("model.depth=14", "data.side=32", "pipeline.layout=1x2"),
        (BATCH, 2),
    ),
    "ffnn-16": Published(
        (3 * 32 * 32 + 1) * 4096 + 15 * 4097 * 4096 + 4097 * 100,
        256,
        cifar,
        ("model.width=16", "model.num_layers=3"),
        (BATCH, 100),
    ),
    "rnn-16": Published(
        256 * 1024 + 16 * 4 * (2 * 1024 * 1024 + 2 * 1024) + 1025 * 256,
        256,
        sentences,
        ("model.width=8", "model.num_layers=3", "data.window_bytes=16", *ON_TWO),
        (BATCH, 16, 256),
    ),
    "gpt-medium": Published(
        24 * (12 * 1024**2 + 13 * 1024) + 2 * 256 * 1024 + 512 * 1024 + 2 * 1024,
        96,
        sentences,
        (
            "model.width=8",
            "model.mlp_width=16",
            "model.num_heads=2",
            "model.num_blocks=4",
            "data.window_bytes=16",
            "pipeline.stages_per_device=2",
            "data.validation_fraction=0.1",
            *ON_TWO,
        ),
        (BATCH, 16, 256),
    ),
}


def small(name: str, folder: Path) -> tuple[str, ...]:
    """The settings that make a recipe small, with its data in a folder."""
    folder.mkdir()
    RECIPES[name].write(folder)
    path = folder / "text.txt" if (folder / "text.txt").exists() else folder
    return (f"data.path={path}", *SMALL, *RECIPES[name].small)


@pytest.mark.parametrize("name", RECIPES)
def test_is_of_the_published_size(name: str, tmp_path: Path) -> None:
    """Weight for weight, and the batch of the paper's scripts."""
    published = RECIPES[name]
    published.write(tmp_path)
    text = tmp_path / "text.txt"
    if text.exists():
        text.write_text("x" * 100_000)
    path = text if text.exists() else tmp_path
    recipe = resolve(name, [f"data.path={path}"]).recipe
    few = ("training.batch_size=8", "data.max_samples=8")
    task = make_task(resolve(name, [f"data.path={path}", *few]).recipe)
    with torch.device("meta"):
        model = task.make_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == published.num_parameters
    assert recipe.training.batch_size == published.batch_size


@pytest.mark.parametrize("name", RECIPES)
def test_model_and_data_fit_together(name: str, tmp_path: Path) -> None:
    """A batch goes through and back, with a score for each class."""
    recipe = resolve(name, small(name, tmp_path / "data")).recipe
    task = make_task(recipe)
    inputs, targets = SampleLoader(task.training, BATCH).example()
    model = task.make_model()
    output = model(inputs)
    named_losses(task.loss(output, targets))[TOTAL].backward()

    assert output.shape == RECIPES[name].shape
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


@pytest.mark.long
@pytest.mark.timeout(220)
@pytest.mark.parametrize("name", RECIPES)
def test_trains_and_evaluates(name: str, tmp_path: Path) -> None:
    """Two steps, an evaluation and a checkpoint, as `hocket train` would."""
    settings = (
        *small(name, tmp_path / "data"),
        f"run.profile_folder={tmp_path / 'profiles'}",
    )
    resolved = resolve(name, settings)
    run_dir, lock = enter_folder(resolved, tmp_path / "run")
    answers_of(
        ENTRY,
        str(run_dir),
        num_workers=resolved.recipe.pipeline.num_workers,
        folder=tmp_path,
        whole_s=RUN_TIMEOUT_S,
    )
    lock.release()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [x["step"] for x in records if x["kind"] == "step"] == [0, 1]
    assert records[-1]["kind"] == "summary"
    assert list((run_dir / "checkpoints").glob("step-*"))
