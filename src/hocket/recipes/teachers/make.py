"""Makes the student and the teacher that a recipe with a section [teacher] names."""

from __future__ import annotations

from typing import assert_never

from torch import nn

from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.teacher_settings import AnyTeacher, TwoViewSettings
from hocket.recipes.models.heads import Heads, Predicting, Projected
from hocket.recipes.models.make import make_model
from hocket.recipes.teachers.losses import NAME
from hocket.recipes.teachers.weights import load_teacher
from hocket.run.data.samples import Samples
from hocket.run.tune.teachers.teacher import Teacher
from hocket.run.weights.momentum import CopyEvery, FollowerUpdate, Momentum


def make_student(recipe: Recipe, training: Samples) -> nn.Module:
    """Make a newly initialised student, the same each time.

    Args:
        recipe: the recipe, with or without a teacher.
        training: the samples to train on.

    Raises:
        RecipeError: as `make_model`.
        DataError: as `make_model`.
        MissingPackageError: as `make_model`.
    """
    model = make_model(recipe, training)
    if isinstance(recipe.teacher, TwoViewSettings):
        return Predicting(model, _heads(recipe.teacher))
    return model


def make_teachers(
    recipe: Recipe, training: Samples, num_steps: int
) -> dict[str, Teacher]:
    """Make a pipeline's teachers, by name; none where the recipe has none.

    One that moves begins with the student's weights, which follow from the seed.

    Args:
        recipe: the recipe.
        training: the samples to train on.
        num_steps: the steps of the whole training.

    Raises:
        RecipeError: as `load_teacher`.
        CheckpointError: as `load_teacher`.
        DataError: as `load_teacher`.
    """
    settings = recipe.teacher
    if settings is None:
        return {}
    if settings.moves:
        net = make_model(recipe, training)
    else:
        net = load_teacher(recipe, training)
    if isinstance(settings, TwoViewSettings):
        net = Projected(net, _heads(settings))
    teacher = Teacher(
        net,
        update=_update(settings, num_steps),
        delay=settings.delay if settings.moves else None,
        look_ahead=settings.look_ahead,
        mode=settings.mode,
        num_microbatches=settings.num_microbatches,
        whole_batch=isinstance(settings, TwoViewSettings),
    )
    return {NAME: teacher}


def _update(settings: AnyTeacher, num_steps: int) -> FollowerUpdate | None:
    match settings.update:
        case "frozen":
            return None
        case "momentum":
            assert settings.momentum is not None, "the recipe is valid"
            final = settings.final_momentum
            return Momentum(
                settings.momentum,
                final,
                None if final is None else num_steps,
                buffers=settings.buffers,
            )
        case "copy":
            assert settings.copy_every_steps is not None, "the recipe is valid"
            return CopyEvery(settings.copy_every_steps, buffers=settings.buffers)
        case _:
            assert_never(settings.update)


def _heads(settings: TwoViewSettings) -> Heads:
    return Heads(
        width=settings.head_width,
        output_width=settings.output_width,
        num_projector_layers=settings.num_projector_layers,
        num_predictor_layers=settings.num_predictor_layers,
    )
