"""Makes a recipe's optimizer and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import cos, pi
from typing import Any, Final, assert_never

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hocket.recipes.config.sections import (
    AdafactorSettings,
    AdamwSettings,
    AnyOptimizer,
    LarsSettings,
    OptimizerSettings,
    SgdSettings,
)
from hocket.teacher.lars import Lars

MATRIX_DIMS: Final = 2  # fewer dimensions: a bias, or a norm's


def make_optimizer(
    settings: AnyOptimizer,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return a factory: each stage gets an optimizer for its own parameters.

    AdamW and SGD are fused: one kernel per update instead of one per parameter.
    """
    return lambda parameters: _optimizer(settings, _groups(settings, parameters))


def _optimizer(
    settings: AnyOptimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    common: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
    }
    match settings:
        case AdamwSettings(beta1=beta1, beta2=beta2, epsilon=eps):
            return torch.optim.AdamW(
                groups, **common, betas=(beta1, beta2), eps=eps, fused=True
            )
        case SgdSettings(momentum=momentum, nesterov=nesterov):
            return torch.optim.SGD(
                groups, **common, momentum=momentum, nesterov=nesterov, fused=True
            )
        case LarsSettings(momentum=momentum, trust=trust):
            return Lars(
                groups, **common, momentum=momentum, trust=trust, decays_vectors=True
            )
        case AdafactorSettings(beta2_decay=beta2_decay, update_clip=update_clip):
            return torch.optim.Adafactor(
                groups, **common, beta2_decay=beta2_decay, d=update_clip
            )
        case _:
            assert_never(settings)


def _groups(
    settings: OptimizerSettings, parameters: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return one group of all parameters, or two, of which one has no decay."""
    every = list(parameters)
    if settings.weight_decay_on == "all":
        return [{"params": every}]
    matrices = [p for p in every if p.dim() >= MATRIX_DIMS]
    others = [p for p in every if p.dim() < MATRIX_DIMS]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate_share(
    settings: OptimizerSettings, num_steps: int
) -> Callable[[int], float]:
    """Return the share of the highest learning rate for each step.

        1 ┤   /'``.
          │  /     `.
          │ /        `.__ final_fraction
          └──┴────────┴─▶ step
          warm-up  num_steps

    Args:
        settings: the end of the warm-up, the decay, and the final share.
        num_steps: the steps of the whole training.
    """
    warmup, final = settings.num_warmup_steps, settings.final_fraction

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        left = (1 + cos(pi * done)) / 2 if settings.fall == "cosine" else 1 - done
        return final + (1 - final) * left

    return share


def make_scheduler(
    share: Callable[[int], float],
) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """Return a factory: each stage's optimizer has the same learning rate."""
    return lambda optimizer: LambdaLR(optimizer, share)
