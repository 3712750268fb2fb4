"""The oracle for training as people do it: one process, written as in torch's docs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hocket.run.data.batch import split_batch
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.step_batch import grouped
from hocket.run.weights.settings import Parameters
from tests.run.support.optimizers import OPTIMIZERS, make_scheduler
from tests.run.support.plain_loop import call_model, in_one_stage, uncut_stage
from tests.run.support.small_models import batches, make_model, specimen_of

SINGLE = {"bfloat16": torch.float32, "float16": torch.float32}  # types of the weights


@dataclass
class Trained:
    """What a training run leaves behind.

    Args:
        state: of the model.
        ema: of the model with averaged weights; empty where none was asked for.
        losses: of each step.
        norms: of each step's gradients.
        skipped: whether each step was.
        gradients: of each step, raw, by name.
    """

    state: dict[str, Tensor]
    ema: dict[str, Tensor]
    losses: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def model_of(case: dict[str, Any]) -> nn.Module:
    """The case's model: float64, or float32 under autocast."""
    model = make_model(case["model"])
    return model.to(SINGLE.get(case.get("precision", ""), torch.float64))


def data_of(case: dict[str, Any]) -> list[Any]:
    """The case's batches; the last is smaller, and so is the last step."""
    accumulate = case.get("accumulate", 1)
    num_batches = case["num_steps"] * accumulate - (accumulate > 1)
    data = batches(case["model"], num_batches, case["batch_size"], case["last"])
    if case.get("precision", "") not in SINGLE:
        return data
    return [(x.float() if isinstance(x, Tensor) else x, y) for x, y in data]


def loss_of(case: dict[str, Any]) -> Any:
    """The case's loss, with a factor that float16 can take for a while only."""
    loss, factor = specimen_of(case["model"]).loss, case.get("factor", 1.0)
    return loss if factor == 1.0 else lambda x, y: factor * loss(x, y)


def plain_training(case: dict[str, Any]) -> Trained:
    """Train the case's specimen without any pipeline."""
    model = model_of(case)
    model.train()
    named = dict(model.named_parameters())
    optimizer = OPTIMIZERS[case.get("optimizer", "adamw")](Parameters(named))
    scheduler = make_scheduler(optimizer) if case.get("scheduler") else None
    scaler = torch.amp.GradScaler("cpu", enabled=case.get("precision") == "float16")
    average = get_ema_multi_avg_fn(case.get("ema_decay") or 0.0)
    averaged = {name: p.detach().clone() for name, p in named.items()}
    found = Trained(model.state_dict(), {})
    for losses in _backwards(model, case, scaler):
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), case.get("clip_norm") or math.inf
        )
        grads = {name: p.grad for name, p in named.items() if p.grad is not None}
        found.gradients.append({name: grad.clone() for name, grad in grads.items()})
        found.norms.append(norm.item())
        found.skipped.append(not math.isfinite(norm))
        found.losses.append(losses)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and math.isfinite(norm):
            scheduler.step()
        average(list(averaged.values()), [p.detach() for p in named.values()], None)
        optimizer.zero_grad(set_to_none=True)
    if "ema_decay" in case:
        found.ema = _with_weights(model, averaged)
    return found


def _with_weights(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    twin = deepcopy(model)
    for name, parameter in twin.named_parameters():
        parameter.data.copy_(weights[name])
    return twin.state_dict()


def _backwards(
    model: nn.Module,
    case: dict[str, Any],
    scaler: torch.amp.GradScaler,
) -> Iterator[dict[str, float]]:
    """All backwards of one step after the other; yields the step's losses."""
    data, loss = data_of(case), loss_of(case)
    num_parts = case["num_microbatches"] * case["num_replicas"]
    uncut = None
    if specimen_of(case["model"]).is_random:
        uncut = uncut_stage(model, data[0], num_parts)
    precision = case.get("precision", "float32")
    autocast = torch.autocast(
        "cpu", getattr(torch, precision), enabled=precision != "float32"
    )
    for step, group in enumerate(grouped(data, case.get("accumulate", 1))):
        parts = [(b, part) for b in group for part in split_batch(b, num_parts)]
        num_samples = sum(part.num_samples for _, part in parts)
        sums: dict[str, float] = {}
        for m, (batch, part) in zip(count(), parts, strict=False):
            with autocast:
                output = (
                    call_model(model, batch[0], part)
                    if uncut is None
                    else in_one_stage(uncut, part, step, m)
                )
                named = named_losses(loss(output, part.targets))
            weight = part.num_samples / num_samples
            scaler.scale(named[TOTAL] * weight).backward()
            for key, value in named.items():
                sums[key] = sums.get(key, 0.0) + value.item() * weight
        yield sums
