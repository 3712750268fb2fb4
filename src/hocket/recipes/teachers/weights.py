"""Loads a frozen teacher: the model of a run's recipe, or of [teacher_model]."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hocket.errors import DataError, RecipeError
from hocket.recipes.config.data_settings import DataFunctionSettings, DataSettings
from hocket.recipes.config.model_settings import ModelFunctionSettings
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolved_in
from hocket.recipes.models.make import make_model
from hocket.recipes.run_files import CHECKPOINTS_NAME, RECIPE_NAME
from hocket.recipes.user_functions import is_known
from hocket.run.checkpoint.export import open_one, read_weights
from hocket.run.data.samples import Samples

# Keys of [data] that a vocabulary depends on which is built from texts.
_BUILT_FROM: Final = ("path", "task", "num_pieces", "validation_fraction")


def load_teacher(recipe: Recipe, training: Samples) -> nn.Module:
    """Make a frozen teacher for a recipe's data, and load its weights.

    Args:
        recipe: the student's recipe.
        training: its samples, for the numbers of classes and words.

    Raises:
        RecipeError: the run has no recipe, or its model does not read these data.
        CheckpointError: there is no checkpoint.
        DataError: the weights do not fit the model.
    """
    assert recipe.teacher is not None, "the recipe has a teacher"
    weights = recipe.teacher.weights
    if recipe.teacher_model is not None:
        own = recipe.model_copy(update={"model": recipe.teacher_model})
        net = make_model(own, training)
        if weights is not None:
            _load(net, _weights_in(Path(weights), averaged=False), weights)
        return net
    assert weights is not None, "the recipe is valid"
    run_dir = _run_dir(Path(weights))
    there = resolved_in(run_dir).recipe
    net = make_model(_with_model_of(there, recipe, run_dir), training)
    averaged = there.training.ema_decay is not None
    _load(net, _weights_in(Path(weights), averaged=averaged), weights)
    return net


def check_teacher(recipe: Recipe) -> None:
    """Refuse a teacher whose weights are not there, before any worker starts.

    Raises:
        RecipeError: as `load_teacher`.
        CheckpointError: as `load_teacher`.
    """
    if recipe.teacher is None or recipe.teacher.weights is None:
        return
    path = Path(recipe.teacher.weights)
    if recipe.teacher_model is None:
        _run_dir(path)
    if not path.is_file():
        open_one(_checkpoints(path))


def _run_dir(path: Path) -> Path:
    """Return the run's folder of a path: the folder itself, or one around it."""
    for folder in (path, *path.parents[:2]):
        if (folder / RECIPE_NAME).is_file():
            return folder
    raise RecipeError(
        f"teacher.weights: {path} is neither the folder of a run nor a checkpoint in "
        f"one: there is no {RECIPE_NAME}. Train a teacher first, with "
        "checkpoint.every_epochs, or say its model in a section [teacher_model]"
    )


def _with_model_of(there: Recipe, recipe: Recipe, run_dir: Path) -> Recipe:
    """Return the student's recipe with the model of another one.

    Raises:
        RecipeError: its model is a function of the user's, which must not run because
            a folder names it; or the vocabularies are not the same.
    """
    own = there.model
    if isinstance(own, ModelFunctionSettings) and not is_known(own.function):
        raise RecipeError(
            f"teacher.weights: the model of {run_dir} is a function, "
            f"{own.function}: name it in a section [teacher_model] as well"
        )
    _check_words(there, recipe, run_dir)
    own_weights = {"pretrained"}  # the checkpoint has them
    model = type(own).model_validate(own.model_dump(exclude=own_weights))
    return recipe.model_copy(update={"model": model})


def _check_words(there: Recipe, recipe: Recipe, run_dir: Path) -> None:
    """Refuse a teacher whose pieces of words have other numbers.

    Raises:
        RecipeError: the vocabularies are not the same.
    """
    ours, theirs = (_vocabulary(each.data) for each in (recipe, there))
    if ours != theirs:
        raise RecipeError(
            f"teacher.weights: the vocabulary of {run_dir} is of {theirs}, and this "
            f"recipe's is of {ours}: a piece would have two numbers. Train both with "
            "the same data.vocabulary, or with the same text"
        )


def _vocabulary(data: DataSettings) -> str:
    """Say what a vocabulary is made of; nothing for data without words."""
    said = data.arguments if isinstance(data, DataFunctionSettings) else {}
    if "vocabulary" in said:
        return str(said["vocabulary"])
    if not {*said} & {"num_tokens", "num_pieces"}:
        return ""
    return ", ".join(f"{key} {said[key]}" for key in _BUILT_FROM if key in said)


def _weights_in(path: Path, *, averaged: bool) -> dict[str, Tensor]:
    """Read the weights of a run, of one of its checkpoints, or of a file."""
    if not path.is_file():
        return read_weights(_checkpoints(path), averaged=averaged)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"teacher.weights: {path} cannot be read as safetensors: {error}"
        ) from error


def _checkpoints(path: Path) -> Path:
    """Return a run's folder of checkpoints; or the path, which is one, or in one."""
    inside = path / CHECKPOINTS_NAME
    return inside if inside.is_dir() else path


def _load(net: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        first, *rest = str(error).splitlines()
        raise DataError(
            f"teacher.weights: {source} does not fit the teacher's model, which is "
            "made for the images and classes of these data: "
            f"{'; '.join(line.strip() for line in rest[:3]) or first}"
        ) from error
