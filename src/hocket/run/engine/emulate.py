"""Train with old weights in one process: what every flush-free run must equal.

Stage s computes step t with the weights after `max(0, t - delay)` updates, and its
gradient is applied to the newest:

    step            0    1    2    3            W(t+1) = W(t) - lr * g(W(t - delay))
    delay 0 reads   W0   W1   W2   W3
    delay 1 reads   W0   W0   W1   W2           WPipe: 1 in front, 0 behind
    delay 2 reads   W0   W0   W0   W1           2BW: 1 everywhere

Old weights are leaves of their own, which `torch.func.functional_call` puts in the
place of the stage's: what autograd saved of them stays valid, whatever is updated.

A weight that stages share has the largest of their delays, in all of them. The first
stage of that delay updates it, with the gradients of all.

A correction may put other values into them (weight prediction), or change the updates:
both are the updater's, and the old weights know nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from hocket.errors import ShapeError
from hocket.model.capture.capture import capture
from hocket.model.capture.no_checkpointing import around_old_weights
from hocket.model.stages.cut import boundaries_from_names, cut
from hocket.model.stages.stage import StageModule
from hocket.run.data.batch import Microbatch, call_arguments, split_batch
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.stage.seed import generators_kept, layers_seeded
from hocket.run.weights.correction.correction import CorrectionName
from hocket.run.weights.settings import OptimizerFactory, SchedulerFactory, Settings
from hocket.run.weights.updater import Updater

_CPU = torch.device("cpu")


def emulate(
    model: nn.Module,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    delays: Sequence[int],
    batches: Iterable[Any],
    *,
    num_microbatches: int = 1,
    cut_at: Sequence[str] = (),
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    correction: CorrectionName = "none",
    num_discounted_updates: int | None = None,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Train a model in this process as if its stages read weights that are old.

    Args:
        model: on the CPU; it is trained in place.
        loss: as for `Pipeline`.
        optimizer: as for `Pipeline`: called once per stage.
        delays: of each stage, in updates: `[1] * n` for PipeDream-2BW, ones and then
            as many zeros for WPipe, zeros for training as usual.
        batches: one per step, pairs `(inputs, targets)`.
        num_microbatches: that each batch is cut into, over all replicas.
        cut_at: the modules with which stages 1, 2, ... begin, such as
            `pipeline.plan.stage_names[1:]`.
        scheduler: as for `Pipeline`; each stage's is stepped once per step.
        clip_norm: the most that the gradients of all stages of one delay may measure
            together: such a group is updated at one time.
        correction: as for `Pipeline`: what is done about the age of gradients.
        num_discounted_updates: as for `Pipeline`: over which "lr-discount" fades.
        seed: as for `Pipeline`: of the random numbers in forwards.

    Returns:
        The losses of each step, by name, weighted by samples.

    Raises:
        RecipeError: there is no such correction, or the optimizer does not go with it.
        ShapeError: there are not as many delays as stages, or one is below 0.
        ModelError: the model cannot be cut so; or a forward that reads old weights
            begins a checkpoint.
        DataError: as for `Pipeline.step`.
    """
    settings = Settings(
        optimizer,
        scheduler,
        clip_norm,
        correction=correction,
        num_discounted_updates=num_discounted_updates,
    )
    history: list[dict[str, float]] = []
    stages: list[_Stage] = []
    spec: pytree.TreeSpec | None = None
    with generators_kept(_CPU):
        for step, batch in enumerate(batches):
            parts = split_batch(batch, num_microbatches)
            if spec is None:
                spec = pytree.tree_structure(call_arguments(batch[0]))
                stages = _stages(model, parts[0], spec, cut_at, delays, settings)
            history.append(_step(stages, parts, loss, step, seed))
            _update(stages, clip_norm)
    return history


@dataclass(slots=True)
class _Weight:
    """A trained parameter, and what stages may still read in its place.

    Args:
        parameter: the newest.
        delay: in updates.
        old: what it was before each of the last `delay` updates, or what was predicted
            in its place, the oldest first; leaves.
    """

    parameter: nn.Parameter
    delay: int
    old: deque[Tensor] = field(default_factory=deque)

    def take_gradient(self) -> None:
        """What the old one got is the newest one's to be updated with."""
        if self.old:
            self.parameter.grad, self.old[0].grad = self.old[0].grad, None

    def keep(self, predicted: Tensor | None) -> None:
        """Keep what it is, before any is updated, and forget what is too old."""
        if not self.delay:
            return
        value = self.parameter if predicted is None else predicted
        self.old.append(value.detach().clone().requires_grad_())
        if len(self.old) > self.delay:
            self.old.popleft()


@dataclass(slots=True)
class _Stage:
    """One stage.

    Args:
        module: with the newest weights.
        delay: in updates.
        weights: that it trains, by name; stages that share one have the same.
        updater: of the parameters that it updates.
    """

    module: StageModule
    delay: int
    weights: Mapping[str, _Weight]
    updater: Updater

    def __call__(self, *values: Tensor) -> Any:
        """Compute it with the weights that its delay promises."""
        # Each place once: torch puts back what it found, and in a place that it fills
        # twice (a module with two names) it finds the second time what it put there.
        leaves = {
            place: weight.old[0] for place, weight in self._places() if weight.old
        }
        if not leaves:
            return self.module(*values)
        with around_old_weights(max(x.delay for x in self.weights.values())):
            return functional_call(self.module, leaves, values, tie_weights=False)

    def _places(self) -> Iterator[tuple[str, _Weight]]:
        """Where each trained parameter stands in any module."""
        weights = {id(x.parameter): x for x in self.weights.values()}
        for path, module in self.module.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in weights:
                    yield f"{path}.{key}" if path else key, weights[id(parameter)]


def _stages(
    model: nn.Module,
    first: Microbatch,
    spec: pytree.TreeSpec,
    cut_at: Sequence[str],
    delays: Sequence[int],
    settings: Settings,
) -> list[_Stage]:
    if len(delays) != len(cut_at) + 1:
        raise ShapeError(
            f"{len(delays)} delays for {len(cut_at) + 1} stages: give one each (cut_at "
            "names the modules with which the stages but the first begin)"
        )
    if min(delays) < 0:
        raise ShapeError(f"delays {list(delays)}: each must be at least 0")
    args, kwargs = pytree.tree_unflatten(first.leaves, spec)
    captured = capture(model, args, kwargs, cut=cut_at)
    modules = cut(captured, boundaries_from_names(captured, cut_at))
    owners = _owners(modules, delays)
    weights = {
        name: _Weight(parameter, delays[owners[name]])
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    stages = []
    for i, (module, delay) in enumerate(zip(modules, delays, strict=True)):
        module.train()
        held = dict(module.named_parameters())
        own = {name: p for name, p in held.items() if owners[name] == i}
        read = {name: weights[name] for name in held if name in weights}
        stages.append(_Stage(module, delay, read, Updater(own, settings, delay=delay)))
    return stages


def _owners(modules: Sequence[StageModule], delays: Sequence[int]) -> dict[str, int]:
    """Which stage updates each weight: the first of those that have it the longest."""
    owners: dict[str, int] = {}
    for i, module in enumerate(modules):
        for name, _ in module.named_parameters():
            if name not in owners or delays[i] > delays[owners[name]]:
                owners[name] = i
    return owners


def _step(
    stages: Sequence[_Stage],
    parts: Sequence[Microbatch],
    loss: LossFunction,
    step: int,
    seed: int,
) -> dict[str, float]:
    """Forward and backward of every microbatch; gradients add up in the leaves read."""
    total = sum(part.num_samples for part in parts)
    sums: dict[str, float] = {}
    for number, part in enumerate(parts):
        output = _forward(stages, part, seed, step, number)
        named = losses_of(loss, output, part.targets)
        weight = part.num_samples / total
        (named[TOTAL] * weight).backward()
        for name, value in named.items():
            sums[name] = sums.get(name, 0.0) + value.item() * weight
    return sums


def _forward(
    stages: Sequence[_Stage], part: Microbatch, seed: int, step: int, number: int
) -> Any:
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        module = stage.module
        own = [part.leaves[i] for i in module.batch_inputs]
        with layers_seeded(module, _CPU, seed, step, "model", number):
            values = stage(*values, *own)
    return values


def _update(stages: Sequence[_Stage], clip_norm: float | None) -> None:
    weights = {name: w for stage in stages for name, w in stage.weights.items()}
    for weight in weights.values():
        weight.take_gradient()
    if clip_norm is not None:
        for delay in {stage.delay for stage in stages}:
            group = [s.updater for s in stages if s.delay == delay]
            nn.utils.clip_grad_norm_(
                [p for updater in group for p in updater.parameters.values()],
                clip_norm,
            )
    predicted: dict[str, Tensor] = {}
    for stage in stages:
        predicted |= stage.updater.predicted() or {}
    for name, weight in weights.items():
        weight.keep(predicted.get(name))
    for stage in stages:
        stage.updater.update()
