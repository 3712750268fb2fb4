"""Evaluates one copy of the model: each worker holds the whole model.

batch   part 0 | part 1   ─▶ rank 0
        part 2 | part 3   ─▶ rank 1
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hocket.errors import SchemaError
from hocket.model.trace.observe import in_mode
from hocket.model.trace.state import overwrite
from hocket.run.cluster.group import WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import (
    Microbatch,
    call_arguments,
    count_samples,
    digest,
    on_device,
    split_batch,
)
from hocket.run.data.loss import LossFunction, losses_of
from hocket.run.data.metrics import DeviceSums, EvaluationSums, Metrics
from hocket.run.data.reads import parts_of
from hocket.run.data.token_mean import count_of, zero_losses
from hocket.run.stage.precision import Precision


@dataclass(frozen=True, slots=True)
class WaveEvaluation:
    """What is evaluated, the same on every worker.

    The two waves, tick and tock, share a device: each trains on every second batch, or
    microbatch (see `order.py`). Tick's copy is evaluated.

    Args:
        module: the copy of the model.
        loss: as for `Waves`.
        metrics: as for `Waves.evaluate`.
        precision: the type that forwards compute in.
        num_microbatches: the parts of a batch on each replica.
        world: the job.
        layout: this worker's replica.
        group: all replicas; None where there is one.
    """

    module: nn.Module
    loss: LossFunction
    metrics: Metrics | None
    precision: Precision
    num_microbatches: int
    world: World
    layout: Layout
    group: WorkerGroup | None


def evaluate_sums(what: WaveEvaluation, loader: Iterable[Any]) -> EvaluationSums:
    """Sum losses and metrics over all samples, for every worker.

    Raises:
        SchemaError: the workers did not evaluate on the same batches.
    """
    sums, seen = DeviceSums(what.metrics), 0
    with in_mode(what.module, training=False), _first_buffers(what), torch.no_grad():
        for batch in loader:
            seen = zlib.crc32(digest(batch).to_bytes(4), seen)
            _add_batch(what, batch, sums)
    parts = what.world.gather_json(
        {**sums.read(), "digest": seen}, "end of the evaluation"
    )
    for rank, part in enumerate(parts):
        if part["digest"] != seen:
            raise SchemaError(
                f"ranks {what.world.rank} and {rank} evaluated on different batches: "
                "every worker must iterate over the same ones in the same order"
            )
    return EvaluationSums(parts, sums.error)


def _add_batch(what: WaveEvaluation, batch: Any, sums: DeviceSums) -> None:
    """Add this worker's part of a batch; a small one may have none for it."""
    if not (num_samples := count_samples(batch)):
        return
    layout, device = what.layout, what.world.device
    num_parts, each = parts_of(num_samples, what.num_microbatches, layout.num_replicas)
    spec = pytree.tree_structure(call_arguments(batch[0]))
    parts = split_batch(on_device(batch, device), num_parts)
    for part in parts[layout.replica * each : (layout.replica + 1) * each]:
        add_part(what.module, what.loss, what.precision, part, spec, sums)


def add_part(
    module: nn.Module,
    loss: LossFunction,
    precision: Precision,
    part: Microbatch,
    spec: pytree.TreeSpec,
    sums: DeviceSums,
) -> Any:
    """Add a part of a batch to the sums; return the model's output.

    Args:
        module: the model, in evaluation mode.
        loss: as for `Waves`.
        precision: the type that forwards compute in.
        part: on the model's device.
        spec: how its leaves are the model's arguments.
        sums: get the losses and metrics.
    """
    args, kwargs = pytree.tree_unflatten(part.leaves, spec)
    device = next(module.parameters()).device
    with precision.autocast(device, caches=False):
        output = module(*args, **kwargs)
        named = losses_of(loss, output, part.targets)
    weight = count_of(loss, part)
    sums.add_losses(named if weight else zero_losses(named, output), weight)
    sums.add_samples(output, part.targets, part.num_samples)
    return output


@contextmanager
def _first_buffers(what: WaveEvaluation) -> Iterator[None]:
    """Evaluate with replica 0's buffers: only they go into checkpoints."""
    if what.group is None:
        yield
        return
    buffers = [*what.module.buffers()]
    own = [x.clone() for x in buffers]
    try:
        for x in buffers:
            what.group.broadcast(x, 0, "buffers of the first replica")
        yield
    finally:
        for x, mine in zip(buffers, own, strict=True):
            overwrite(x, mine)
