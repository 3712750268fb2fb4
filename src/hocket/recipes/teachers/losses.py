"""The losses that a section [teacher] names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, assert_never

from torch import Tensor

from hocket.errors import RecipeError
from hocket.recipes.config.teacher_settings import (
    AnyTeacher,
    ByolSettings,
    DistilbertSettings,
    DistillationSettings,
    MocoV3Settings,
)
from hocket.recipes.data.load import whole_of
from hocket.run.data.loss import LossFunction
from hocket.run.data.samples import Samples
from hocket.teacher.losses.distilbert import DistilBERT
from hocket.teacher.losses.distillation import Distillation
from hocket.teacher.losses.two_views import Byol, MocoV3

NAME: Final = "teacher"  # in a pipeline


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
            return Distillation(
                temperature=settings.temperature,
                weight=settings.soft_weight,
                hard_weight=settings.hard_weight,
                teacher=NAME,
            )
        case DistilbertSettings():
            guessed_share = getattr(whole_of(training), "guessed_share", None)
            if guessed_share is None:
                raise RecipeError(
                    "teacher.kind 'distilbert' reads masked text: the function of "
                    "[data] must return samples with guessed_share, the share of all "
                    "pieces that is to be guessed (the others' targets are -100)"
                )
            return DistilBERT(
                temperature=settings.temperature,
                soft_weight=settings.soft_weight,
                mlm_weight=settings.mlm_weight,
                cosine_weight=settings.cosine_weight,
                mlm_share=guessed_share,
                teacher=NAME,
            )
        case ByolSettings():
            return OutputLoss(Byol(NAME))
        case MocoV3Settings(temperature=temperature):
            return OutputLoss(MocoV3(temperature, NAME))
        case _:
            assert_never(settings)
