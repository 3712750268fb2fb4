"""A recipe's model, data, loss and metrics, made real, and laid out in steps.

Makes the student and the teacher that a recipe with a section [teacher] names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, assert_never

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hocket.errors import DataError, RecipeError
from hocket.options import SHORT_WEIGHTS
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolved_in
from hocket.recipes.config.sections import (
    DataFunctionSettings,
    DataSettings,
    DigitsSettings,
    ModelFunctionSettings,
)
from hocket.recipes.config.settings import (
    AnyTeacher,
    ByolSettings,
    DistilbertSettings,
    DistillationSettings,
    MocoV3Settings,
    TwoViewSettings,
)
from hocket.recipes.data import CastSamples, load_samples, whole_of
from hocket.recipes.models.make import Predicting, Projected, make_model
from hocket.recipes.objectives import (
    KnnEvaluation,
    Metrics,
    WholeEvaluation,
    class_loss,
    class_metrics,
    evaluation_loader,
    knn_evaluation,
    two_view_samples,
)
from hocket.recipes.run_files import CHECKPOINTS_NAME, RECIPE_NAME
from hocket.recipes.training.optimizer import learning_rate_share
from hocket.recipes.user_functions import check_function, is_known, load_function
from hocket.run.checkpoint.export import open_one, read_weights
from hocket.run.data.loss import LossFunction
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.data.samples import Samples
from hocket.run.tune.teachers.teacher import Teacher
from hocket.run.weights.momentum import CopyEvery, FollowerUpdate, Momentum
from hocket.teacher.losses.distillation import DistilBERT, Distillation
from hocket.teacher.losses.two_views import Byol, MocoV3
from hocket.teacher.views import TwoViewLoader

NAME: Final = "teacher"  # in a pipeline


@dataclass(frozen=True)
class Task:
    """What there is to train, and in which steps.

    Args:
        recipe: the recipe.
        training: samples to train on.
        evaluation: samples to evaluate on.
        loss: the mean over samples.
        metrics: named means over samples; the first is what the task is about.
        evaluate: the evaluation of all outputs together, in the place of metrics.
    """

    recipe: Recipe
    training: Samples
    evaluation: Samples
    loss: LossFunction
    metrics: Metrics | None
    evaluate: KnnEvaluation | WholeEvaluation | None = None

    def make_model(self) -> nn.Module:
        """Make a newly initialised model, the same each time.

        Who trains it in stages must hold no other reference to it.

        Raises:
            RecipeError: as `recipes.models.make.make_model`.
            DataError: the same.
            MissingPackageError: the same.
        """
        model, teacher = make_model(self.recipe, self.training), self.recipe.teacher
        if isinstance(teacher, TwoViewSettings):
            model = Predicting(model, teacher)
        if self.recipe.training.precision == SHORT_WEIGHTS:
            model.to(torch.bfloat16)
        return model

    def make_teachers(self) -> dict[str, Teacher]:
        """Make the teachers that the loss reads, by name; none where there is none.

        One that moves begins with the student's weights, which follow from the seed.

        Raises:
            RecipeError: as `load_teacher`.
            CheckpointError: as `load_teacher`.
            DataError: as `load_teacher`.
        """
        settings = self.recipe.teacher
        if settings is None:
            return {}
        make = make_model if settings.moves else load_teacher
        net = make(self.recipe, self.training)
        if self.recipe.training.precision == SHORT_WEIGHTS:
            net.to(torch.bfloat16)
        if isinstance(settings, TwoViewSettings):
            net = Projected(net, settings)
        teacher = Teacher(
            net,
            update=_update(settings, self.num_steps),
            delay=settings.delay if settings.moves else None,
            look_ahead=settings.look_ahead,
            mode=settings.mode or ("train" if settings.moves else "eval"),
            num_microbatches=settings.num_microbatches,
            whole_batch=isinstance(settings, TwoViewSettings),
        )
        return {NAME: teacher}

    @property
    def batches_per_epoch(self) -> int:
        """The full batches in the samples."""
        return self.training.num_samples // self.recipe.training.batch_size

    @property
    def num_steps(self) -> int:
        """The steps of the whole training."""
        training = self.recipe.training
        num_batches = self.batches_per_epoch * training.num_epochs
        num_steps = num_batches // training.accumulate
        return min(num_steps, training.max_steps or num_steps)

    def steps_in(self, num_epochs: float = 1.0) -> int:
        """Return the steps of so many epochs, rounded, and at least one."""
        num_batches = num_epochs * self.batches_per_epoch
        return max(1, round(num_batches / self.recipe.training.accumulate))

    @cached_property
    def learning_rate_share(self) -> Callable[[int], float]:
        """The share of the highest learning rate, by step."""
        return learning_rate_share(self.recipe.optimizer, self.num_steps)

    def loader(self) -> SampleLoader:
        """Return a loader of all batches of all steps, epoch after epoch."""
        training, teacher = self.recipe.training, self.recipe.teacher
        make: Callable[..., SampleLoader] = partial(SampleLoader, self.training)
        if isinstance(teacher, TwoViewSettings):
            make = partial(TwoViewLoader, two_view_samples(self.training, teacher))
        return make(
            training.batch_size,
            seed=training.seed,
            num_batches=self.num_steps * training.accumulate,
            num_workers=training.num_loaders,
        )

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation follows this step, as it does the last one."""
        training = self.recipe.training
        num_done, every = step + 1, training.evaluate_every_steps
        every = every or self.steps_in(training.evaluate_every_epochs or 1.0)
        return num_done == self.num_steps or num_done % every == 0

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        num_done, settings = step + 1, self.recipe.checkpoint
        if num_done == self.num_steps and settings.final:
            return True
        every = settings.every_steps
        if settings.every_epochs is not None:
            every = self.steps_in(settings.every_epochs)
        return every is not None and num_done % every == 0

    def epoch(self, step: int) -> int:
        """Return the epoch of a step's first batch, from 0."""
        return step * self.recipe.training.accumulate // self.batches_per_epoch

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step's update."""
        return self.recipe.optimizer.learning_rate * self.learning_rate_share(step)


def make_task(recipe: Recipe) -> Task:
    """Load the data.

    Raises:
        DataError: the data are missing or too few for the recipe's batches.
        RecipeError: a function of the user's cannot be had.
    """
    training, evaluation = load_samples(recipe)
    if recipe.training.precision == SHORT_WEIGHTS:
        training, evaluation = (
            CastSamples(x, x.num_samples, torch.bfloat16)
            for x in (training, evaluation)
        )
    _check_enough(training, recipe)
    loss, metrics = _objective(recipe, training)
    evaluate: KnnEvaluation | WholeEvaluation | None = None
    evaluate = knn_evaluation(recipe, training, evaluation)
    if recipe.task.evaluate is not None:
        measure = load_function(recipe.task.evaluate)
        loader = evaluation_loader(recipe, evaluation)
        evaluate = WholeEvaluation(loader, loss, measure)
    return Task(recipe, training, evaluation, loss, metrics, evaluate)


def check_data(recipe: Recipe) -> None:
    """Refuse data and weights that are not there, before any worker starts.

    Reads no data: each worker does.

    Raises:
        DataError: the path of the data does not exist.
        RecipeError: a function of the zoo cannot be had, or misses an argument.
    """
    check_teacher(recipe)
    match recipe.data:
        case DataFunctionSettings(arguments={"path": path}) if not Path(path).exists():
            raise DataError(f"{path} does not exist: name it with --set data.path=...")
        case DataFunctionSettings() as settings if is_known(settings.function):
            check_function("data", settings, [])
        case _:
            pass


def _objective(
    recipe: Recipe, training: Samples
) -> tuple[LossFunction, Metrics | None]:
    """The loss and metrics that the recipe names, or the digits' own."""
    loss: LossFunction | None = None
    metrics: Metrics | None = None
    if isinstance(recipe.data, DigitsSettings):
        loss, metrics = class_loss, class_metrics
    if recipe.teacher is not None:
        loss = teacher_loss(recipe.teacher, training)
    elif recipe.task.loss is not None:
        loss = load_function(recipe.task.loss)
    if recipe.task.metrics is not None:
        metrics = load_function(recipe.task.metrics)
    assert loss is not None, "the recipe's validation asks for one"
    return loss, None if recipe.task.evaluate else metrics


def _check_enough(training: Samples, recipe: Recipe) -> None:
    """Refuse data that do not fill one step.

    Raises:
        DataError: names both numbers.
    """
    batch_size, accumulate = recipe.training.batch_size, recipe.training.accumulate
    if training.num_samples < batch_size:
        raise DataError(
            f"{training.num_samples} samples to train on do not fill one batch of "
            f"{batch_size}: --set training.batch_size={training.num_samples} or less, "
            "or give more data"
        )
    num_batches = training.num_samples // batch_size * recipe.training.num_epochs
    if num_batches < accumulate:
        raise DataError(
            f"{recipe.training.num_epochs} epochs of {training.num_samples} samples "
            f"are {num_batches} batches of {batch_size}, fewer than the {accumulate} "
            f"of one step: --set training.accumulate={num_batches} or less, or train "
            "for more epochs"
        )


def _update(settings: AnyTeacher, num_steps: int) -> FollowerUpdate | None:
    if settings.momentum is not None:  # the recipe is valid
        final = settings.final_momentum
        over = None if final is None else num_steps
        return Momentum(settings.momentum, final, over, buffers=settings.buffers)
    if settings.copy_every_steps is not None:
        return CopyEvery(settings.copy_every_steps, buffers=settings.buffers)
    return None


@dataclass(frozen=True, slots=True)
class OutputLoss:
    """Calls a loss with the entry `output` of what the student returns.

    Args:
        loss: reads one tensor of each net.
    """

    loss: Callable[[Any, Any, Mapping[str, Any]], Tensor]

    def __call__(
        self, output: Mapping[str, Tensor], targets: Any, teachers: Mapping[str, Any]
    ) -> Tensor:
        """Compute the loss."""
        return self.loss(output["output"], targets, teachers)


def teacher_loss(settings: AnyTeacher, training: Samples) -> LossFunction:
    """Return the loss `loss(output, targets, teachers)` of a section.

    Args:
        settings: the section.
        training: the samples to train on.

    Raises:
        RecipeError: the loss reads other data.
    """
    match settings:
        case DistillationSettings():
            weights = settings.soft_weight, settings.hard_weight
            return Distillation(settings.temperature, *weights, teacher=NAME)
        case DistilbertSettings():
            guessed_share = getattr(whole_of(training), "guessed_share", None)
            if guessed_share is None:
                raise RecipeError(
                    "teacher.kind 'distilbert' reads masked text: the function of "
                    "[data] must return samples with guessed_share, the share of all "
                    "pieces that is to be guessed (the others' targets are -100)"
                )
            return DistilBERT(
                settings.temperature,
                settings.soft_weight,
                settings.mlm_weight,
                settings.cosine_weight,
                guessed_share,
                teacher=NAME,
            )
        case ByolSettings():
            return OutputLoss(Byol(NAME))
        case MocoV3Settings(temperature=temperature):
            return OutputLoss(MocoV3(temperature, NAME))
        case _:
            assert_never(settings)


# Loads a frozen teacher: the model of a run's recipe, or of [teacher_model].

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
