"""The oracle: one process, one microbatch after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.capture import capture
from hocket.model.cut import cut
from hocket.run.batch import Microbatch, call_arguments, split_batch
from hocket.run.loss import TOTAL, named_losses
from hocket.run.seed import seed_generators, seed_of
from tests.run.zoo import ZOO, batches, make_model

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
    if "dropout" in name:
        args, kwargs = call_arguments(split_inputs(data[0][0], num_parts))
        stages = cut(capture(model, args, kwargs), boundaries)
    history = []
    for step, batch in enumerate(data):
        parts = split_batch(batch, num_parts)
        total_samples = sum(part.num_samples for part in parts)
        sums: dict[str, float] = {}
        for m, part in enumerate(parts):
            if stages is None:
                output = _call(model, batch[0], part)
            else:
                output = _in_stages(stages, part, step, m)
            named = named_losses(ZOO[name].loss(output, part.targets))
            weight = part.num_samples / total_samples
            (named[TOTAL] * weight).backward()
            for key, value in named.items():
                sums[key] = sums.get(key, 0.0) + value.item() * weight
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        history.append(sums)
    return model.state_dict(), history


def split_inputs(inputs: Any, num_parts: int) -> Any:
    """The first microbatch's inputs in the form that the user gave them."""

    def first(value: Any) -> Any:
        return value.tensor_split(num_parts)[0] if isinstance(value, Tensor) else value

    if isinstance(inputs, dict):
        return {key: first(value) for key, value in inputs.items()}
    return first(inputs)


def _call(model: nn.Module, inputs: Any, part: Microbatch) -> Any:
    spec = pytree.tree_structure(call_arguments(inputs))
    args, kwargs = pytree.tree_unflatten(part.leaves, spec)
    return model(*args, **kwargs)


def _in_stages(stages: Any, part: Microbatch, step: int, microbatch: int) -> Any:
    values: tuple[Tensor, ...] = ()
    for number, stage in enumerate(stages):
        if stage.has_random:
            seed_generators(CPU, seed_of(0, step, number, microbatch))
        values = stage(*values, *(part.leaves[i] for i in stage.batch_inputs))
    return values
