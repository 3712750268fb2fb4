"""Checks the sections [teacher] and [teacher_model] against the other ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.recipes.config.data_settings import (
    ImageSettings,
    MaskedTextSettings,
    SquadSettings,
)
from hocket.recipes.config.model_settings import (
    ResnetSettings,
    ResnextSettings,
    VitSettings,
)
from hocket.recipes.config.teacher_settings import (
    AnyTeacher,
    DistilbertSettings,
    DistillationSettings,
    TwoViewSettings,
)

if TYPE_CHECKING:
    from hocket.recipes.config.recipe import Recipe


def teacher_faults(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each fault of a recipe's teacher."""
    if recipe.teacher is not None:
        yield from _model_faults(recipe, recipe.teacher)
        yield from _pipeline_faults(recipe)
    elif recipe.teacher_model is not None:
        yield "teacher_model: has no effect without a section [teacher]"
    match recipe.teacher, recipe.data:
        case DistilbertSettings(), MaskedTextSettings():
            pass
        case DistilbertSettings(), data:
            yield f"teacher.kind 'distilbert' reads 'masked-text', not {data.kind!r}"
        case DistillationSettings(), SquadSettings():
            yield "teacher.kind 'distillation' reads scores of classes, not 'squad'"
        case _:
            pass
    if isinstance(recipe.teacher, TwoViewSettings):
        yield from _two_view_faults(recipe, recipe.teacher)


def _model_faults(recipe: Recipe, teacher: AnyTeacher) -> Iterator[str]:
    """Check that a teacher has a model, and weights where it is frozen."""
    has_model = recipe.teacher_model is not None
    if not teacher.moves and teacher.weights is None and not has_model:
        yield (
            "teacher.weights: missing: name the folder of a run with checkpoints "
            "(--set teacher.weights=FOLDER), or give a section [teacher_model]; or let "
            'the teacher follow the student (update = "momentum")'
        )
    if teacher.moves and has_model:
        yield (
            f"teacher_model: has no effect with teacher.update {teacher.update!r}: the "
            "teacher begins as a copy of the student"
        )


def _pipeline_faults(recipe: Recipe) -> Iterator[str]:
    """Check what would be a second loss."""
    if recipe.task.loss is not None:
        yield "task.loss: has no effect with a section [teacher], whose kind is a loss"


def _two_view_faults(recipe: Recipe, teacher: TwoViewSettings) -> Iterator[str]:
    """Check that there are images and features for a loss of two views."""
    match recipe.model, recipe.data:
        case VitSettings() | ResnetSettings() | ResnextSettings(), ImageSettings():
            pass
        case model, data:
            yield (
                f"teacher.kind {teacher.kind!r} reads two views of colour images with "
                f"a model of ours for them, not {data.kind!r} with {model.kind!r}"
            )
    if not teacher.moves:
        yield (
            f"teacher.update 'frozen': with teacher.kind {teacher.kind!r} the teacher "
            "follows the student: say 'momentum'"
        )
    if recipe.task.metrics is not None:
        yield (
            f"task.metrics: has no effect with teacher.kind {teacher.kind!r}, whose "
            "features are evaluated by k-NN"
        )
