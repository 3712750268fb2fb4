"""What workers compare of their optimizers and schedules, before the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.update_text import update_text


def text_of(scheduler: Any, weight_decay: float = 0.0) -> str:
    """How two parameters would be updated."""
    settings = TrainingConfig(
        optimizer=lambda p: torch.optim.AdamW(p, 0.1, weight_decay=weight_decay),
        scheduler=scheduler,
    )
    return update_text(settings, dict(nn.Linear(3, 2).named_parameters()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (partial(lr.StepLR, step_size=30), partial(lr.StepLR, step_size=31)),
        (partial(lr.StepLR, step_size=9), partial(lr.StepLR, step_size=9, gamma=0.5)),
        (
            partial(lr.CosineAnnealingLR, T_max=10_000),
            partial(lr.CosineAnnealingLR, T_max=20_000),
        ),
        (
            partial(lr.LambdaLR, lr_lambda=lambda step: 0.9**step),
            partial(lr.LambdaLR, lr_lambda=lambda step: 0.8**step),
        ),
        (partial(lr.ConstantLR, factor=0.5), None),
    ],
)
def test_a_scheduler_with_another_argument_is_another_text(
    one: Any, other: Any
) -> None:
    """Its class is the same: such workers trained on to the end."""
    assert text_of(one) == text_of(one) != text_of(other)


def test_a_schedule_that_ends_is_compared_to_its_end() -> None:
    """Steps beyond the total raise."""
    schedule = partial(lr.OneCycleLR, max_lr=0.1, total_steps=5)
    assert "0.004, 0.0950485, 0.0611262, 0.0188258, 4e-07" in text_of(schedule)
    assert text_of(schedule) != text_of(schedule, weight_decay=0.5)
