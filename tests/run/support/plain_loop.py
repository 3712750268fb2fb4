"""The oracle: one process, one microbatch after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import StageModule, cut
from hocket.run.data.batch import Microbatch, call_arguments, split_batch
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.stage.seed import layers_seeded
from tests.run.support.small_models import batches, make_model, specimen_of

CPU = torch.device("cpu")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, as everywhere in these tests."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def plain_loop(
    name: str,
    *,
    num_parts: int,
    num_steps: int,
    batch_size: int,
    last: int,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train the specimen without any pipeline.

    Models without random numbers are called whole, as users would. Others run as one
    stage, whose code seeds each layer that draws.

    Args:
        name: in the zoo.
        num_parts: microbatches over all replicas.
        num_steps: of training.
        batch_size: of all batches but the last.
        last: size of the last one.
    """
    model = make_model(name)
    model.train()
    optimizer = make_optimizer(model.parameters())
    data = batches(name, num_steps, batch_size, last)
    uncut = None
    specimen = specimen_of(name)
    if specimen.is_random:
        uncut = uncut_stage(model, data[0], num_parts)
    history = []
    for step, batch in enumerate(data):
        parts = split_batch(batch, num_parts)
        total_samples = sum(part.num_samples for part in parts)
        sums: dict[str, float] = {}
        for m, part in enumerate(parts):
            if uncut is None:
                output = call_model(model, batch[0], part)
            else:
                output = in_one_stage(uncut, part, step, m)
            named = named_losses(specimen.loss(output, part.targets))
            weight = part.num_samples / total_samples
            (named[TOTAL] * weight).backward()
            for key, value in named.items():
                sums[key] = sums.get(key, 0.0) + value.item() * weight
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        history.append(sums)
    return model.state_dict(), history


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
