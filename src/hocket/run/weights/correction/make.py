"""Makes the correction of one stage by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import nn

from hocket.options import CorrectionName
from hocket.run.weights.correction.correction import Correction
from hocket.run.weights.correction.error_feedback import ErrorFeedback
from hocket.run.weights.correction.lr_discount import NUM_DISCOUNTED, LrDiscount
from hocket.run.weights.correction.weight_prediction import WeightPrediction


def make_correction(
    name: CorrectionName,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    delay: int,
    *,
    num_discounted_updates: int | None = None,
) -> Correction | None:
    """Make a stage's correction; None if none of its weights is stale.

    Args:
        name: the correction's name.
        parameters: the stage's trained parameters, by the uncut model's names.
        optimizer: the stage's optimizer.
        delay: the stage's delay in updates.
        num_discounted_updates: the updates over which a discount fades; a usual number
            when not given.

    Raises:
        ConfigError: the optimizer has no learning rate to discount.
    """
    if not delay:
        return None
    match name:
        case "none":
            return None
        case "error-feedback":
            return ErrorFeedback(parameters, delay)
        case "weight-prediction":
            return WeightPrediction(parameters, optimizer, delay)
        case "lr-discount":
            num_updates = num_discounted_updates or NUM_DISCOUNTED
            return LrDiscount(optimizer, delay, num_updates)
        case _:
            assert_never(name)
