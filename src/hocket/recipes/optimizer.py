"""Optimizers and their learning rate over time, as a recipe says them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import cos, pi
from typing import assert_never

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hocket.recipes.recipe import AdamwSettings, OptimizerSettings, SgdSettings

# fused: one kernel for a stage's update instead of one per parameter and operation.


def make_optimizer(
    settings: AdamwSettings | SgdSettings,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A factory: each stage gets an optimizer for its own parameters."""
    match settings:
        case AdamwSettings():
            return lambda parameters: torch.optim.AdamW(
                parameters,
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                weight_decay=settings.weight_decay,
                fused=True,
            )
        case SgdSettings():
            return lambda parameters: torch.optim.SGD(
                parameters,
                lr=settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                fused=True,
            )
        case _:
            assert_never(settings)


def learning_rate_share(
    settings: OptimizerSettings, num_steps: int
) -> Callable[[int], float]:
    """The share of the highest learning rate that each step uses, from step 0.

        1 ┤   /'``.
          │  /     `.
          │ /        `.__ final_fraction
          └──┴────────┴─▶ step
          warm-up  num_steps

    Args:
        settings: the heights and the end of the warm-up.
        num_steps: of the whole training.
    """
    warmup, final = settings.num_warmup_steps, settings.final_fraction

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return final + (1 - final) * (1 + cos(pi * done)) / 2

    return share


def make_scheduler(
    share: Callable[[int], float],
) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """A factory: each stage's optimizer follows the same learning rate."""
    return lambda optimizer: LambdaLR(optimizer, share)
