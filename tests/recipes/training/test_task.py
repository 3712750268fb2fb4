"""A recipe becomes a model, data, a loss and metrics; too few data are refused."""

from __future__ import annotations

from math import isclose, log
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.zoo import text
from examples.zoo.text import Gpt
from hocket.errors import DataError
from hocket.recipes.config.resolve import resolve
from hocket.recipes.data import load_samples, whole_of
from hocket.recipes.models.make import Block, VisionTransformer, make_model
from hocket.recipes.objectives import class_loss, class_metrics
from hocket.recipes.training.task import Task, make_task
from hocket.run.data.sample_loader import SampleLoader


def task_of(name: str, *settings: str) -> Task:
    """A recipe's task."""
    return make_task(resolve(name, settings).recipe)


def model_of(name: str, *settings: str) -> nn.Module:
    """A recipe's model."""
    return task_of(name, *settings).make_model()


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    """A text of 2,000 bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"To be, or not to be: " * 96)
    return path


def test_digits_vit_is_what_it_says() -> None:
    """Its model takes its batches, and its loss begins near that of guessing."""
    task = task_of("digits-vit")
    inputs, targets = SampleLoader(task.training, 64).example()
    model = task.make_model()
    output = model(inputs).detach()

    assert isinstance(model, VisionTransformer)
    assert task.loss is class_loss
    assert output.shape == (64, 10)
    assert abs(float(class_loss(output, targets)) - log(10)) < 0.5


def test_weights_in_bfloat16_have_inputs_in_bfloat16() -> None:
    """The model and images are cast; targets and facts of the data are not."""
    task = task_of("digits-vit", "training.precision=bfloat16-weights")
    inputs, targets = SampleLoader(task.training, 64).example()
    output = task.make_model()(inputs)
    assert {x.dtype for x in (inputs, output)} == {torch.bfloat16}
    assert targets.dtype is torch.int64
    assert class_loss(output, targets).dtype is torch.float32
    assert whole_of(task.training) is not task.training


def test_text_gpt_is_what_it_says(text_path: Path) -> None:
    """The same, over bytes."""
    task = task_of("text-gpt", f"data.path={text_path}", "training.batch_size=8")
    inputs, targets = SampleLoader(task.training, 8).example()
    model = task.make_model()
    output = model(inputs).detach()

    assert isinstance(model, Gpt)
    assert task.loss is text.loss
    assert output.shape == (8, 64, 256)
    assert abs(float(text.loss(output, targets)) - log(256)) < 0.5


def test_weights_follow_from_the_seed() -> None:
    """So that every worker begins with the same ones, whatever it drew before."""

    def weights(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)
        recipe = resolve("digits-vit", [f"training.seed={seed}"]).recipe
        model = make_model(recipe, load_samples(recipe)[0])
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_each_key_of_the_model_reaches_it(text_path: Path) -> None:
    """The sizes that the recipe says are the model's."""
    sizes = ["width=24", "num_blocks=3", "num_heads=2", "mlp_width=40", "dropout=0.25"]
    settings = [f"model.{size}" for size in sizes]
    vit = model_of("digits-vit", *settings, "model.patch_size=4", "model.pooling=mean")
    gpt = model_of(
        "text-gpt",
        *settings,
        f"data.path={text_path}",
        "data.window_bytes=16",
        "model.tie_weights=true",
    )

    for model in (vit, gpt):
        assert isinstance(model, VisionTransformer | Gpt)
        assert len(model.blocks) == 3
        assert model.positions.shape[-1] == 24
        block = model.blocks[0]
        assert isinstance(block, Block)
        assert block.attention.num_heads == 2
        assert block.mlp[0].out_features == 40
        assert block.dropout.p == 0.25
    assert isinstance(vit, VisionTransformer)
    assert vit.positions.shape[0] == 4
    assert isinstance(gpt, Gpt)
    assert gpt.window_bytes == 16
    assert gpt.head.weight is gpt.embedding.weight


def test_too_few_samples_are_refused_with_both_numbers() -> None:
    """How many there are, how many a batch takes, and what would do."""
    with pytest.raises(DataError, match=r"1347 samples .* one batch of 2000: --set"):
        task_of("digits-vit", "training.batch_size=2000")
    with pytest.raises(DataError, match=r"training\.batch_size=1347 or less"):
        task_of("digits-vit", "training.batch_size=2000")


def test_accuracy_counts_right_guesses() -> None:
    """Of digits, and of bytes."""
    score = torch.tensor([[0.0, 1.0], [1.0, 0.0], [3.0, 2.0]])
    label = torch.tensor([1, 0, 1])
    assert isclose(float(class_metrics(score, label)["accuracy"]), 2 / 3, abs_tol=1e-6)
    byte = text.metrics(score[None], label[None])
    assert isclose(float(byte["accuracy"]), 2 / 3, abs_tol=1e-6)


def test_guessing_costs_eight_bits_per_byte() -> None:
    """A model that knows nothing; the loss says the same in nats."""
    score, target = torch.zeros(2, 5, 256), torch.zeros(2, 5, dtype=torch.int64)
    assert isclose(float(text.metrics(score, target)["bits_per_byte"]), 8, abs_tol=1e-5)
    assert isclose(float(text.loss(score, target)), log(256), abs_tol=1e-5)


@pytest.mark.parametrize(
    ("settings", "num_steps", "evaluated"),
    [
        (["num_epochs=2"], 42, [20, 41]),
        (["num_epochs=2", "max_steps=30"], 30, [20, 29]),
        (["num_epochs=1", "max_steps=30"], 21, [20]),
        (["num_epochs=1", "evaluate_every_epochs=0.5"], 21, [9, 19, 20]),
        (["num_epochs=3", "evaluate_every_epochs=2"], 63, [41, 62]),
        (["num_epochs=1", "evaluate_every_epochs=0.001"], 21, list(range(21))),
    ],
)
def test_a_course_is_as_long_as_the_recipe_says(
    settings: list[str], num_steps: int, evaluated: list[int]
) -> None:
    """Full batches only, an end where the first limit is, an evaluation at the end."""
    fixed = ["batch_size=64", "evaluate_every_epochs=1.0"]
    items = [f"training.{item}" for item in (*fixed, *settings)]
    recipe = resolve("digits-vit", items).recipe
    task = make_task(recipe)

    assert task.batches_per_epoch == 1347 // 64 == 21
    assert task.num_steps == num_steps == len(task.loader())
    assert list(filter(task.evaluates_after, range(num_steps))) == evaluated
    assert task.epoch(20) == 0
    assert task.epoch(21) == 1
    assert isclose(task.learning_rate(42), 2e-3) or num_steps <= 42
