"""The oracle: one process, one microbatch after the other, as in torch's docs."""

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
from torch.utils import _pytree as pytree

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import StageModule, cut
from hocket.run.data.batch import Microbatch, call_arguments, split_batch
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.step_batch import grouped
from hocket.run.stage.seed import layers_seeded
from hocket.run.weights.settings import Parameters
from tests.run.support.optimizers import OPTIMIZERS, make_scheduler
from tests.run.support.small_models import batches, make_model, specimen_of

CPU = torch.device("cpu")
SINGLE = {"bfloat16": torch.float32, "float16": torch.float32}  # types of the weights
make_optimizer: Any = OPTIMIZERS["adamw"]  # as everywhere in these tests


@dataclass
class Trained:
    """What a training run leaves behind.

    Args:
        state: of the model.
        ema: of the model with averaged weights; empty where none was asked for.
        losses: of each step.
        norms: of each step's gradients.
        skipped: whether each step was.
        gradients: of each step, raw, by name; of the optimizer "sgd" alone.
    """

    state: dict[str, Tensor]
    ema: dict[str, Tensor]
    losses: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def model_of(case: dict[str, Any]) -> nn.Module:
    """The case's model in its own type, or in float32 under autocast."""
    model, dtype = make_model(case["model"]), SINGLE.get(case.get("precision", ""))
    return model if dtype is None else model.to(dtype)


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


def num_parts_of(case: dict[str, Any]) -> int:
    """Return how many microbatches all pipelines of a run have together."""
    num_pipelines = case.get("num_replicas", 1) * case.get("num_shards", 1)
    found: int = case["num_microbatches"] * num_pipelines
    return found


def plain_loop(
    name: str, *, num_parts: int, **sizes: int
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train a specimen as most tests do; return its state, and each step's losses.

    Args:
        name: in the zoo.
        num_parts: microbatches over all replicas.
        sizes: `num_steps`, `batch_size` of all batches but the last, and `last`.
    """
    case = {"model": name, "num_microbatches": num_parts, **sizes}
    found = plain_training(case)
    return found.state, found.losses


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
        if case.get("optimizer") == "sgd":
            grads = {name: p.grad for name, p in named.items() if p.grad is not None}
            found.gradients.append({name: grad.clone() for name, grad in grads.items()})
        found.norms.append(norm.item())
        found.skipped.append(not math.isfinite(norm))
        found.losses.append(losses)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and math.isfinite(norm):
            scheduler.step()
        if "ema_decay" in case:
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
    model: nn.Module, case: dict[str, Any], scaler: torch.amp.GradScaler
) -> Iterator[dict[str, float]]:
    """All backwards of one step after the other; yields the step's losses.

    Models without random numbers are called whole, as users would. Others run as one
    stage, whose code seeds each layer that draws.
    """
    data, loss = data_of(case), loss_of(case)
    num_parts = num_parts_of(case)
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


def call_model(model: nn.Module, inputs: Any, part: Microbatch) -> Any:
    """What the uncut model makes of a microbatch."""
    spec = pytree.tree_structure(call_arguments(inputs))
    args, kwargs = pytree.tree_unflatten(part.leaves, spec)
    return model(*args, **kwargs)


def uncut_stage(model: nn.Module, batch: Any, num_parts: int) -> StageModule:
    """The whole model as one stage."""
    spec = pytree.tree_structure(call_arguments(batch[0]))
    first = split_batch(batch, num_parts)[0]
    args, kwargs = pytree.tree_unflatten(first.leaves, spec)
    return cut(capture(model, args, kwargs), ())[0]


def in_one_stage(
    stage: StageModule, part: Microbatch, step: int, microbatch: int
) -> Any:
    """What the uncut model makes of a microbatch, each layer with its own numbers."""
    own = [part.leaves[i] for i in stage.batch_inputs]
    with layers_seeded(stage, CPU, 0, step, "model", microbatch):
        return stage(*own)
