"""Trains as `hocket.Waves` does, in one process and one batch after the other.

Two copies of the model ("tick" and "tock") take turns. Batch n has N(n) samples and the
gradient g'(n). With sync="wave":

    batch n    g'(n), on copy n % 2
    update n   of copy n % 2, by (N(n) g'(n) + N(n-1) g'(n-1)) / (N(n) + N(n-1))

Source: figure 9 of Wang et al., "Wavelet" (MLSys'21). `hocket.Waves` is tested against
it; there are no streams, events or messages here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError
from hocket.options import PrecisionName
from hocket.run.data.batch import call_arguments, count_samples, split_batch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.stage.precision import Precision
from hocket.run.stage.seed import preserve_generators
from hocket.run.weights.settings import (
    OptimizerFactory,
    SchedulerFactory,
    TrainingConfig,
)
from hocket.sharing.waves.order import NUM_WAVES, SyncName
from hocket.sharing.waves.player import (
    checked_microbatches,
    microbatch_seed,
    refuse_precision,
)
from hocket.sharing.waves.wave import Gradients, Wave

_CPU = torch.device("cpu")
Losses: TypeAlias = dict[str, float]


def emulate_waves(
    model: nn.Module,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    batches: Iterable[Any],
    *,
    sync: SyncName = "wave",
    num_microbatches: int | None = None,
    num_replicas: int = 1,
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    precision: PrecisionName = "float32",
    seed: int = 0,
) -> tuple[list[Losses], tuple[nn.Module, ...]]:
    """Train a model to the result of `hocket.Waves`, one batch after the other.

    A batch is taken from `batches` after the update of the one before: what makes them
    may look at the model between updates.

    Args:
        model: on the CPU; trained in place. It is replica 0's copy for even batches.
        loss: as for `Waves`.
        optimizer: as for `Waves`.
        batches: pairs `(inputs, targets)`, each of all replicas.
        sync: as for `Waves`; with "exact" it is the plain loop over microbatches.
        num_microbatches: as for `Waves`: the parts of each batch on each replica.
        num_replicas: the number of workers.
        scheduler: as for `Waves`.
        clip_norm: as for `Waves`.
        precision: as for `Waves`, without "float16".
        seed: as for `Waves`.

    Returns:
        The losses of each batch by name, weighted by samples; and each wave's copy of
        the model on the first replica, of which the first one is `model`.

    Raises:
        ConfigError: an option is not valid.
        DataError: as for `Waves.train`.
    """
    num_parts = checked_microbatches(sync, num_microbatches)
    settings = TrainingConfig(
        optimizer=optimizer,
        scheduler=scheduler,
        clip_norm=clip_norm,
        precision=precision,
    )
    if settings.compute_precision is Precision.FLOAT16:
        raise ConfigError(
            'precision="float16" needs a loss scale, which the emulator does not have: '
            'take "bfloat16" or "float32"'
        )
    refuse_precision(sync, settings.compute_precision)
    num_copies = NUM_WAVES if sync == "wave" else 1
    nets = [
        [model if i == j == 0 else copy.deepcopy(model) for j in range(num_replicas)]
        for i in range(num_copies)
    ]
    copies = [_Copy(replicas, settings) for replicas in nets]
    found = list[Losses]()
    before: tuple[int, Gradients] | None = None
    for step, batch in enumerate(batches):
        own = copies[step % num_copies]
        with preserve_generators(_CPU):
            losses, gradients = own.gradients(
                batch, loss, num_parts, partial(microbatch_seed, seed, step)
            )
        due = count_samples(batch), gradients
        own.update(gradients if before is None else _mean(due, before))
        before = due if sync == "wave" else None
        for other in copies:
            if other is not own:
                other.skip_batch()
        found.append(losses)
    return found, tuple(replicas[0] for replicas in nets)


class _Copy:
    """One wave's copy of the weights, with a net and an optimizer on each replica."""

    def __init__(self, nets: Sequence[nn.Module], settings: TrainingConfig) -> None:
        self.nets, self.settings = nets, settings
        self.replicas = [Wave(net, settings) for net in nets]

    def gradients(
        self,
        batch: Any,
        loss: LossFunction,
        num_parts: int,
        seed_of: Callable[[int], int],
    ) -> tuple[Losses, Gradients]:
        """Return the losses of a batch, and the sum of its replicas' gradients."""
        parts = split_batch(batch, num_parts * len(self.nets))
        spec = pytree.tree_structure(call_arguments(batch[0]))
        autocast = self.settings.compute_precision.autocast(_CPU, caches=False)
        total, sums = Losses(), list[Gradients]()
        for replica, net in enumerate(self.nets):
            for i in range(replica * num_parts, (replica + 1) * num_parts):
                share = parts[i].num_samples / count_samples(batch)
                args, kwargs = pytree.tree_unflatten(parts[i].leaves, spec)
                torch.manual_seed(seed_of(i))
                with autocast:
                    losses = losses_of(loss, net(*args, **kwargs), parts[i].targets)
                torch.manual_seed(seed_of(i))
                (losses[TOTAL] * share).backward()
                for name, value in losses.items():
                    total[name] = total.get(name, 0.0) + value.item() * share
            sums.append([p.grad for p in self.replicas[replica].parameters])
            net.zero_grad()
        return total, [_sum(column) for column in zip(*sums, strict=True)]

    def update(self, gradients: Gradients) -> None:
        """Clip gradients, and update the weights of all replicas by them."""
        for replica in self.replicas:
            replica.put_gradients([None if x is None else x.clone() for x in gradients])
            if self.settings.clip_norm is not None:
                nn.utils.clip_grad_norm_(replica.parameters, self.settings.clip_norm)
            assert replica.updater is not None
            replica.updater.update()

    def skip_batch(self) -> None:
        """Step the schedules: they count the other wave's batches, too."""
        for replica in self.replicas:
            replica.skip_batch()


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    here = [x for x in gradients if x is not None]
    return torch.stack(here).sum(0) if here else None


def _mean(own: tuple[int, Gradients], before: tuple[int, Gradients]) -> Gradients:
    """Return the mean of two batches' gradients, each with its number of samples."""
    (num, mine), (num_before, theirs) = own, before
    return [
        _sum(
            [
                None if x is None else x * (number / (num + num_before))
                for number, x in ((num, a), (num_before, b))
            ]
        )
        for a, b in zip(mine, theirs, strict=True)
    ]
