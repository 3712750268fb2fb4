"""Every kind of model meets the kinds of data that it reads, in files of their form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from hocket.errors import DataError
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.task import Task, make_task
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.sample_loader import SampleLoader
from tests.recipes.support import stl10_folder

NUM_SAMPLES: Final = 8
WORDS: Final = ("a cat sat", "dogs run far", "the sun rose", "it is late")
BERT: Final = (
    "model.width=8",
    "model.num_blocks=1",
    "model.num_heads=2",
    "model.mlp_width=16",
    "data.num_tokens=16",
)


def image_folder(folder: Path) -> None:
    """Two classes of images, of any size."""
    image = pytest.importorskip("PIL.Image", reason="extra `vision`")
    for part in ("train", "val"):
        for label, name in enumerate(("cats", "dogs")):
            (folder / part / name).mkdir(parents=True)
            for number in range(NUM_SAMPLES // 2):
                picture = image.new("RGB", (20 + number, 30), (90 * label, 40, number))
                picture.save(folder / part / name / f"{number}.png")


def table(folder: Path, header: str, row: Callable[[int], str]) -> None:
    """A task of GLUE."""
    rows = [row(number) for number in range(NUM_SAMPLES)]
    for name in ("train.tsv", "dev.tsv", "dev_matched.tsv"):
        (folder / name).write_text("\n".join([header, *rows]) + "\n")


def sst2(folder: Path) -> None:
    """One sentence."""
    table(folder, "sentence\tlabel", lambda i: f"{WORDS[i % 4]}\t{i % 2}")


def mnli(folder: Path) -> None:
    """Two sentences, three classes."""
    labels = ("entailment", "neutral", "contradiction")
    table(
        folder,
        "sentence1\tsentence2\tgold_label",
        lambda i: f"{WORDS[i % 4]}\t{WORDS[i % 3]}\t{labels[i % 3]}",
    )


IMAGES: Final = "data.function=examples.zoo.pictures:image_folder"
CASES: Final = {
    "vit on an image folder": (
        "cifar10-vit",
        (IMAGES, "data.side=16", "model.patch_size=8"),
        image_folder,
        (NUM_SAMPLES, 2),
    ),
    "resnet on an image folder": (
        "cifar10-resnet",
        (IMAGES, "data.side=16"),
        image_folder,
        (NUM_SAMPLES, 2),
    ),
    "nasnet on an image folder": (
        "nasnet-mobile",
        ("model.num_features=96", "model.num_cells=1", "data.side=33", IMAGES),
        image_folder,
        (NUM_SAMPLES, 2),
    ),
    "torchvision's own on an image folder": (
        "torchvision",
        ("model.name=squeezenet1_1", "data.side=32", IMAGES),
        image_folder,
        (NUM_SAMPLES, 2),
    ),
    "resnet on stl10": (
        "cifar10-resnet",
        ("data.function=examples.zoo.pictures:stl10", "data.side=16"),
        stl10_folder.write,
        (NUM_SAMPLES, 10),
    ),
    "bert on sst2": ("mrpc-bert", (*BERT, "data.task=sst2"), sst2, (NUM_SAMPLES, 2)),
    "bert on mnli": ("mrpc-bert", (*BERT, "data.task=mnli"), mnli, (NUM_SAMPLES, 3)),
}


def task_of(name: str, folder: Path, *settings: str) -> Task:
    """A recipe's task on files in a folder."""
    taken = ("data.shift_pixels=", "data.flip=") if IMAGES in settings else ()
    fixed = (f"data.path={folder}", f"training.batch_size={NUM_SAMPLES}")
    return make_task(resolve(name, [*taken, *fixed, *settings]).recipe)


def model_of(folder: Path, *settings: str) -> Any:
    """A BERT, on files in a folder."""
    return task_of("mrpc-bert", folder, *settings).make_model()


def called(model: nn.Module, inputs: object) -> object:
    """The model's output, in the way that a pipeline calls it."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@pytest.mark.parametrize("case", CASES)
def test_a_model_reads_the_data(case: str, tmp_path: Path) -> None:
    """A batch goes through it, the loss is one number, and the metrics are named."""
    name, settings, write, shape = CASES[case]
    write(tmp_path)
    task = task_of(name, tmp_path, *settings)
    inputs, targets = SampleLoader(task.training, NUM_SAMPLES).example()
    output = called(task.make_model(), inputs)
    loss = named_losses(task.loss(output, targets))[TOTAL]
    loss.backward()

    scores = output["logits"] if isinstance(output, dict) else output
    assert isinstance(scores, torch.Tensor)
    assert scores.shape == shape
    assert loss.isfinite()
    assert task.metrics is not None
    assert 0 <= task.metrics(output, targets)["accuracy"] <= 1
    assert task.evaluation.num_samples == NUM_SAMPLES


def test_max_samples_takes_the_first_ones(tmp_path: Path) -> None:
    """Of both parts, where there are more."""
    sst2(tmp_path)
    few = ("data.max_samples=3", "training.batch_size=3", "pipeline.num_microbatches=1")
    task = task_of("mrpc-bert", tmp_path, *BERT, "data.task=sst2", *few)
    assert (task.training.num_samples, task.evaluation.num_samples) == (3, 3)


def test_bert_begins_with_weights_from_a_folder(tmp_path: Path) -> None:
    """As Hugging Face saves them; all but the new head's are taken."""
    sst2(tmp_path)
    settings = (*BERT, "data.task=sst2")
    saved = model_of(tmp_path, *settings, "training.seed=5")
    saved.save_pretrained(tmp_path / "saved")
    pretrained = f"model.pretrained={tmp_path / 'saved'}"
    model = model_of(tmp_path, *settings, pretrained)
    assert all(part.training for part in model.modules())  # past bug: no dropout

    for name, parameter in saved.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Missing ones, and those of a BERT of another width."""
    sst2(tmp_path)
    settings = (*BERT, "data.task=sst2")
    with pytest.raises(DataError, match=r"absent has no model\.safetensors"):
        model_of(tmp_path, *settings, "model.pretrained=absent")
    saved = model_of(tmp_path, *settings)
    saved.save_pretrained(tmp_path / "saved")
    pretrained = f"model.pretrained={tmp_path / 'saved'}"
    with pytest.raises(DataError, match=r"do not fit a BERT of the recipe's sizes"):
        model_of(tmp_path, *settings, "model.width=16", pretrained)
