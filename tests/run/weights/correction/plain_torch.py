"""Corrected training with plain torch: lists of what weights were, and what was added.

Made to be read beside docs/explanation/staleness.md, and of nothing that hocket trains
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hocket.run.weights.settings import Parameters

MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How to train.

    Args:
        correction: by its word.
        delays: of each stage.
        num_discounted: updates.
    """

    correction: str
    delays: Sequence[int]
    num_discounted: int = 1000


@dataclass(slots=True)
class _History:
    """Of one weight.

    Args:
        newest: the weight.
        reads: what steps read, by the number of updates.
        added: what the optimizer added in each update.
    """

    newest: Tensor
    reads: list[Tensor]
    added: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Stage:
    """One stage.

    Args:
        named: its parameters.
        delay: in updates.
        optimizer: of them.
        scheduler: of that.
    """

    named: dict[str, nn.Parameter]
    delay: int
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The options that it is updated with."""
        return next(
            group
            for group in self.optimizer.param_groups
            if any(p is parameter for p in group["params"])
        )


def trained(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    make: tuple[MakeOptimizer, MakeSchedule],
    batches: Sequence[tuple[Tensor, Tensor]],
    wanted: Wanted,
) -> dict[str, Tensor]:
    """The weights after all steps, by name.

    Args:
        model: is changed.
        stages: the names of the parameters of each.
        make: the optimizer and the learning-rate schedule of each stage.
        batches: one per step.
        wanted: the correction, and where.
    """
    parameters = dict(model.named_parameters())
    made = [*_made(parameters, stages, make, wanted.delays)]
    past = {
        name: _History(p.detach().clone(), [p.detach().clone()])
        for name, p in parameters.items()
    }
    for t, (inputs, targets) in enumerate(batches):
        for stage in made:
            for name, p in stage.named.items():
                p.data = past[name].reads[max(0, t - stage.delay)].clone()
        model.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(inputs), targets).backward()
        for stage in made:
            _update(stage, past, t, wanted)
    return {name: x.newest for name, x in past.items()}


def _made(
    parameters: dict[str, nn.Parameter],
    stages: Sequence[Sequence[str]],
    make: tuple[MakeOptimizer, MakeSchedule],
    delays: Sequence[int],
) -> Iterator[_Stage]:
    for names, delay in zip(stages, delays, strict=True):
        named = {name: parameters[name] for name in names}
        optimizer = make[0](Parameters(named))
        yield _Stage(named, delay, optimizer, make[1](optimizer))


def _update(stage: _Stage, past: dict[str, _History], t: int, wanted: Wanted) -> None:
    for name, p in stage.named.items():
        p.data = past[name].newest.clone()
    groups = stage.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    if wanted.correction == "lr-discount":
        left = 1 - min(t / wanted.num_discounted, 1)
        for group in groups:
            group["lr"] = group["lr"] / (1 + stage.delay) ** left
    stage.optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    stage.scheduler.step()
    for name, p in stage.named.items():
        _note(stage, p, past[name], t, wanted)


def _note(
    stage: _Stage, p: nn.Parameter, own: _History, t: int, wanted: Wanted
) -> None:
    d = stage.delay
    now = p.detach().clone()
    added = now - own.newest
    own.added.append(added)
    if wanted.correction == "error-feedback" and d:
        before = own.added[t - d] if t >= d else torch.zeros_like(added)
        now = now + (added - before)
    own.newest = now
    predicts_from_state = wanted.correction == "weight-prediction"
    ahead = d * _direction(stage, p, now, added) if predicts_from_state else 0.0
    own.reads.append(now + ahead)


def _direction(stage: _Stage, p: nn.Parameter, now: Tensor, added: Tensor) -> Tensor:
    """As the optimizer itself would say, where it is one of torch's two."""
    group, state = stage.group_of(p), stage.optimizer.state.get(p, {})
    if type(stage.optimizer) is torch.optim.SGD and group["momentum"]:
        moved = state.get("momentum_buffer")
        return -group["lr"] * (torch.zeros_like(now) if moved is None else moved)
    if type(stage.optimizer) is torch.optim.AdamW:
        if not state:
            return torch.zeros_like(now)
        beta1, beta2 = group["betas"]
        num_updates = state["step"].item()  # not a power of a float32
        mean = state["exp_avg"] / (1 - beta1**num_updates)
        square = state["exp_avg_sq"] / (1 - beta2**num_updates)
        pull = group["weight_decay"] * now
        return -group["lr"] * (mean / (square.sqrt() + group["eps"]) + pull)
    return added
