"""One wave: a copy of the model, its optimizer, and the gradients that are due."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError, SchemaError
from hocket.model.trace.observe import in_mode, is_random
from hocket.model.trace.state import overwrite, saved_tensors
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
from hocket.run.device.operator_mode import OperatorMode
from hocket.run.stage.precision import Precision
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater

Gradients: TypeAlias = list[Tensor | None]  # of all parameters, in the model's order


@dataclass(frozen=True, slots=True)
class Due:
    """The gradients of one batch, which updates are to read.

    Args:
        num_samples: the samples of the batch, over all replicas.
        gradients: this replica's part of their sum.
    """

    num_samples: int
    gradients: Gradients


class Wave:
    """One wave and its copy of the model.

    Args:
        module: its copy of the model.
        settings: makes its optimizer; None if another wave's updates its weights.

    Attributes:
        parameters: those that are trained, in the model's order.
        updater: its optimizer and learning-rate schedule; None without `settings`.
    """

    def __init__(self, module: nn.Module, settings: TrainingConfig | None) -> None:
        self.module = module
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.updater = None if settings is None else Updater(named, settings)

    def state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers, each tied tensor once."""
        seen: dict[int, str] = {}
        found = saved_tensors(self.module)
        return {
            name: x.detach()
            for name, x in found.items()
            if seen.setdefault(id(x), name) == name
        }

    def ties(self) -> dict[str, tuple[str, ...]]:
        """Return the other names of each tensor that has several, by its first."""
        names: dict[int, list[str]] = {}
        for name, x in saved_tensors(self.module).items():
            names.setdefault(id(x), []).append(name)
        return {first: tuple(more) for first, *more in names.values() if more}

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers."""
        names = {name for name, _ in self.module.named_parameters()}
        return {name: x for name, x in self.state().items() if name not in names}

    def take_gradients(self, num_samples: int) -> Due:
        """Return the gradients of a whole batch: the next one begins with none.

        Args:
            num_samples: the samples of the batch, over all replicas.
        """
        found = Due(num_samples, [parameter.grad for parameter in self.parameters])
        self.put_gradients([None] * len(self.parameters))
        return found

    def put_gradients(self, gradients: Gradients) -> None:
        """Set the gradients that the optimizer reads."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def share_weights_of(self, other: Wave) -> None:
        """Compute with another wave's weights, and keep gradients of its own."""
        pairs = zip(self.module.parameters(), other.module.parameters(), strict=True)
        for mine, theirs in pairs:
            mine.data = theirs.data

    def share_buffers_of(self, other: Wave) -> None:
        """Go on with the buffers that another wave's last forward has left."""
        pairs = zip(self.module.modules(), other.module.modules(), strict=True)
        for mine, theirs in pairs:
            mine._buffers.update(theirs._buffers)

    def share_modes_of(self, other: Wave) -> None:
        """Set the training mode of each module as in another wave."""
        pairs = zip(self.module.modules(), other.module.modules(), strict=True)
        for mine, theirs in pairs:
            mine.training = theirs.training

    def skip_batch(self) -> None:
        """Step the learning-rate schedule, and averages, for a batch of the other wave.

        So the rates of update `n` are those of a job that makes all updates itself, and
        averages forget as many batches.
        """
        assert self.updater is not None
        with warnings.catch_warnings():  # tock's first step is before its update
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step()")
            self.updater.advance()


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model.

    Raises:
        ModelError: it cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"the second wave needs a copy of the model, and copy.deepcopy failed: "
            f"{type(error).__name__}: {error}. Make what cannot be copied outside of "
            "the model, or give the class a __deepcopy__"
        ) from error


def mean_gradients(own: Due, before: Due | None) -> Gradients:
    """Return the mean of the gradients of two batches, weighted by their samples.

    Args:
        own: the gradients of the wave whose weights are updated.
        before: the gradients of the batch before; None if there is none.

    Returns:
        New tensors: each batch is read once more. None where none has a gradient.
    """
    if before is None:
        return [None if x is None else x.clone() for x in own.gradients]
    share = own.num_samples / (own.num_samples + before.num_samples)
    found: Gradients = []
    for mine, theirs in zip(own.gradients, before.gradients, strict=True):
        if theirs is None:
            found.append(None if mine is None else mine * share)
        elif mine is None:
            found.append(theirs * (1.0 - share))
        else:
            found.append(torch.lerp(theirs, mine, share))
    return found


def sum_gradients(own: Due, other: Due) -> Gradients:
    """Return the sum of two waves' gradients; adds to `own`'s in place."""
    found: Gradients = []
    for mine, theirs in zip(own.gradients, other.gradients, strict=True):
        if mine is None or theirs is None:
            found.append(theirs if mine is None else mine)
        else:
            found.append(mine.add_(theirs))
    return found


def tensors_of(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [x for x in gradients if x is not None]


class DrawDetector(OperatorMode):
    """Notes whether an operator draws random numbers.

    Attributes:
        has_drawn: whether any has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator."""
        self.has_drawn = self.has_drawn or is_random(func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))


# Evaluates one copy of the model: each worker holds the whole model.
#
# batch   part 0 | part 1   ─▶ rank 0
#         part 2 | part 3   ─▶ rank 1
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
