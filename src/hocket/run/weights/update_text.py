"""Describes how all weights would be updated, for workers to compare.

Each worker makes only the optimizers of its own stages, from its own process's
arguments. Here every worker makes one for small copies of all parameters, which must be
equal everywhere:

    AdamW, StepLR
    betas=(0.9, 0.999) lr=0.001 ...   a.weight a.bias
    betas=(0.9, 0.999) lr=0.0001 ...  b.weight
    rates: 0.001 0.0001, 0.001 0.0001, 0.0009 0.00009, ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.model.profile.optimizer_bytes import small_copies
from hocket.run.weights.settings import Parameters, TrainingConfig

_NUM_UPDATES: Final = 1000  # whose learning rates are compared
_PLAIN: Final = (bool, int, float, str, tuple, type(None))


def update_text(settings: TrainingConfig, parameters: Mapping[str, Tensor]) -> str:
    """Return the optimizer and the learning-rate schedule, with all their numbers.

    Args:
        settings: make the optimizer and the schedule.
        parameters: all trained parameters, on any worker, by name.

    Returns:
        Text; empty if the copies are too small for the user's functions.
    """
    small = small_copies(parameters)
    if not small:
        return ""
    with contextlib.suppress(Exception):  # raised again by the stage's own
        return "\n".join(_lines(settings, small))
    return ""


def _lines(settings: TrainingConfig, small: dict[str, nn.Parameter]) -> Iterator[str]:
    optimizer = settings.make_optimizer(Parameters(small))
    scheduler = settings.make_scheduler(optimizer)
    yield f"{type(optimizer).__name__}, {type(scheduler).__name__}"
    names = {id(x): name for name, x in small.items()}
    for group in optimizer.param_groups:
        members = " ".join(names.get(id(x), "?") for x in group["params"])
        options = sorted((key, x) for key, x in group.items() if key != "params")
        yield " ".join(f"{key}={_text(x)}" for key, x in options) + f"  {members}"
    if scheduler is not None:
        yield f"rates: {', '.join(_rates(optimizer, scheduler))}"


def _rates(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> Iterator[str]:
    """Yield the groups' learning rates after each of the first updates.

    Six digits are compared: hosts may round a cosine differently. A schedule that ends
    earlier, or depends on what the user changes while training, has fewer.
    """
    with contextlib.suppress(Exception):
        optimizer.step()  # no gradient: it updates nothing; schedulers ask for it
        for _ in range(_NUM_UPDATES):
            yield " ".join(f"{float(x['lr']):.6g}" for x in optimizer.param_groups)
            scheduler.step()


def _text(value: Any) -> str:
    if isinstance(value, Tensor):  # a learning rate may be one
        return str(value.tolist())
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
