"""The oracle: one process, one microbatch after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch, call_arguments, split_batch
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.stage.seed import seed_generators, seed_of
from tests.run.support.small_models import batches, make_model, specimen_of

CPU = torch.device("cpu")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, as everywhere in these tests."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def plain_loop(
    name: str,
    boundaries: tuple[int, ...],
    *,
    num_parts: int,
    num_steps: int,
    batch_size: int,
    last: int,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train the specimen without any pipeline.

    Models without random numbers are called whole, as users would. For dropout the
    oracle needs to know where stages begin, since each seeds its own numbers.

    Args:
        name: in the zoo.
        boundaries: of the pipeline that this is compared with; for dropout.
        num_parts: microbatches over all replicas.
        num_steps: of training.
        batch_size: of all batches but the last.
        last: size of the last one.
    """
    model = make_model(name)
    model.train()
    optimizer = make_optimizer(model.parameters())
    data = batches(name, num_steps, batch_size, last)
    stages = None
    specimen = specimen_of(name)
    if specimen.is_random:
        spec = pytree.tree_structure(call_arguments(data[0][0]))
        first = split_batch(data[0], num_parts)[0]
        args, kwargs = pytree.tree_unflatten(first.leaves, spec)
        stages = cut(capture(model, args, kwargs), boundaries)
    history = []
    for step, batch in enumerate(data):
        parts = split_batch(batch, num_parts)
        total_samples = sum(part.num_samples for part in parts)
        sums: dict[str, float] = {}
        for m, part in enumerate(parts):
            if stages is None:
                output = call_model(model, batch[0], part)
            else:
                output = in_stages(stages, part, step, m)
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


def in_stages(stages: Any, part: Microbatch, step: int, microbatch: int) -> Any:
    """What the stages make of it one after the other, each with its own numbers."""
    values: tuple[Tensor, ...] = ()
    for number, stage in enumerate(stages):
        if stage.has_random:
            seed_generators(CPU, seed_of(0, step, number, microbatch))
        values = stage(*values, *(part.leaves[i] for i in stage.batch_inputs))
    return values
