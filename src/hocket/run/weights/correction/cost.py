"""Predicts the memory of a correction, before there are stages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import assert_never

from torch import Tensor

from hocket.model.profile.optimizer_bytes import small_copies
from hocket.planner.correction_cost import CorrectionCost
from hocket.run.weights.correction.weight_prediction import predicts_from_state
from hocket.run.weights.settings import Parameters, TrainingConfig


def correction_cost(
    settings: TrainingConfig, parameters: Mapping[str, Tensor]
) -> CorrectionCost:
    """Return a correction's cost, in copies of the weights that a stage trains.

    Args:
        settings: the correction's name and the optimizer.
        parameters: all trained parameters, by name.
    """
    name = settings.correction
    match name:
        case "none" | "lr-discount":
            return CorrectionCost(name)
        case "error-feedback":
            return CorrectionCost(name, kept_per_delay=1, at_work=1)
        case "weight-prediction":
            num = 0 if _predicts_from_state(settings, parameters) else 1
            return CorrectionCost(name, kept=num, at_work=num, predicts_weights=True)
        case _:
            assert_never(name)


def _predicts_from_state(
    settings: TrainingConfig, parameters: Mapping[str, Tensor]
) -> bool:
    """Return whether the optimizer's state gives the next update; False if unknown."""
    with contextlib.suppress(Exception):  # some optimizers refuse small copies
        return predicts_from_state(
            settings.make_optimizer(Parameters(small_copies(parameters)))
        )
    return False
