"""A frozen teacher is the model of a run's recipe, with a checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from hocket.checkpoint import newest, read_weights
from hocket.errors import CheckpointError, DataError, RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.data import load_samples
from hocket.recipes.models.make import VisionTransformer
from hocket.recipes.training.run_folder import claim_folder
from hocket.recipes.training.task import check_teacher, load_teacher
from hocket.recipes.training.train import train_recipe

SMALL: Final = (
    "model.width=16",
    "model.num_heads=2",
    "model.num_blocks=1",
    "model.mlp_width=16",
    "training.batch_size=30",
    "training.max_steps=2",
    "training.ema_decay=0.5",
    "optimizer.num_warmup_steps=1",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=2",
    "checkpoint.every_steps=2",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a vision transformer, of two steps and a checkpoint."""
    folder = tmp_path_factory.mktemp("teacher")
    profiles = f"run.profile_folder={folder / 'profiles'}"
    resolved = resolve("digits-vit", [*SMALL, profiles])
    run_dir = claim_folder(folder / "run", resolved.to_toml())
    train_recipe(resolved.recipe, run_dir)
    return run_dir


def student(weights: Path, *settings: str) -> Recipe:
    """A student of digits, with this teacher."""
    return resolve("kd-digits", [f"teacher.weights={weights}", *settings]).recipe


def loaded(recipe: Recipe) -> torch.nn.Module:
    """Its teacher."""
    check_teacher(recipe)
    return load_teacher(recipe, load_samples(recipe)[0])


def test_a_run_says_its_model_and_its_weights(run_dir: Path) -> None:
    """Averaged ones, as the run evaluates these; of the folder or of a checkpoint."""
    checkpoint = newest(run_dir / "checkpoints")
    assert checkpoint is not None
    expected = read_weights(checkpoint, averaged=True)
    for path in (run_dir, checkpoint):
        net = loaded(student(path))
        assert isinstance(net, VisionTransformer)
        state = net.state_dict()
        assert all(torch.equal(state[name], x) for name, x in expected.items())
        assert state.keys() == expected.keys()


def test_a_file_of_weights_needs_a_model(run_dir: Path, tmp_path: Path) -> None:
    """Which is said in [teacher_model]."""
    weights = read_weights(run_dir / "checkpoints")
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    kinds = [x.replace("model.", "teacher_model.") for x in SMALL[:4]]
    net = loaded(student(path, "teacher_model.kind=vit", *kinds))
    state = net.state_dict()
    assert all(torch.equal(state[name], x) for name, x in weights.items())
    with pytest.raises(RecipeError, match=r"say its model in a section \[teacher_"):
        loaded(student(path))


def test_weights_of_another_size_are_refused(run_dir: Path) -> None:
    """With the names of what differs."""
    recipe = student(run_dir, "teacher_model.kind=vit", "teacher_model.width=32")
    with pytest.raises(DataError, match=r"does not fit the teacher's model.*positions"):
        loaded(recipe)


def test_a_run_without_checkpoints_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """Before a worker starts."""
    text = (run_dir / "recipe.toml").read_text()
    claim_folder(tmp_path / "run", text)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        check_teacher(student(tmp_path / "run"))
    with pytest.raises(RecipeError, match=r"there is no recipe\.toml"):
        check_teacher(student(tmp_path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('kind = "vit"\npatch_size = 3', "patch_size 3 does not divide"),
        ('kind = "function"\nfunction = "a:b"', r"is a function, a:b: name it in a"),
    ],
)
def test_a_model_that_cannot_teach(model: str, message: str, tmp_path: Path) -> None:
    """It does not read these data; or it would run code that a folder names."""
    text = f"[model]\n{model}\n[data]\nkind = 'function'\nfunction = 'a:b'\n"
    text += "[task]\nloss = 'a:b'\n"
    rest = "[optimizer]\nkind = 'sgd'\n"
    claim_folder(tmp_path / "run", text + rest)
    with pytest.raises(RecipeError, match=message):
        load_teacher(student(tmp_path / "run"), load_samples(student(tmp_path))[0])


def test_words_must_have_the_same_numbers(tmp_path: Path) -> None:
    """A vocabulary is of a file, or of the text that it was built from."""
    texts = ("text", "other")
    for name in texts:
        (tmp_path / name).write_text("to be or not to be\n" * 100)
    own = [f"data.path={tmp_path / 'text'}", "data.num_tokens=8"]
    run = resolve("text-bert", [*own, f"data.path={tmp_path / 'other'}"])
    claim_folder(tmp_path / "run", run.to_toml())
    weights = f"teacher.weights={tmp_path / 'run'}"
    recipe = resolve("kd-distilbert", [*own, weights]).recipe
    with pytest.raises(RecipeError, match=r"of path \S+other, and .* of path \S+text:"):
        load_teacher(recipe, load_samples(recipe)[0])
