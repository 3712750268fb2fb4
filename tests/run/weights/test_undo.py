"""What was kept comes back to the last bit, wherever an optimizer keeps it."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR, StepLR

from hocket.errors import RecipeError
from hocket.run.weights.settings import (
    OptimizerFactory,
    Parameters,
    SchedulerFactory,
    Settings,
)
from hocket.run.weights.undo import Kept
from hocket.run.weights.undo_check import check_undo
from hocket.run.weights.updater import Updater
from tests.run.support.optimizers import OPTIMIZERS


@dataclass
class Memory:
    """What an optimizer may keep its numbers in."""

    values: list[float] = field(default_factory=list)


class Elsewhere(torch.optim.SGD):
    """Gradient descent that counts where nobody sees it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        num_calls = 0

        def count() -> int:
            nonlocal num_calls
            num_calls += 1
            return num_calls

        self.count = count

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """With a rate that falls from call to call."""
        (group,) = self.param_groups
        rate = group["lr"]
        group["lr"] = rate / self.count()
        super().step()
        group["lr"] = rate


class Counting:
    """A rate that falls from call to call, whichever step it is called for."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, step: int) -> float:
        """A third of the last one; 0 to begin with, as a warm-up may."""
        self.num_calls += 1
        return 3.0**-self.num_calls if step else 0.0


def test_containers_are_refilled_in_place() -> None:
    """Whoever else refers to them, or to a tensor in them, sees the old values."""
    tensor, memory = torch.arange(4.0), Memory([1.0])
    view = tensor[1:3]
    inner: list[Any] = [tensor, (torch.ones(2), {"a"})]
    held: dict[str, Any] = defaultdict(list, {"inner": inner, "memory": memory})
    queue = deque([1, 2], maxlen=2)
    kept = Kept([held, queue, tensor])
    assert kept.num_bytes == (4 + 2) * 4  # the tensor once, though it is found twice

    tensor.mul_(5)
    inner[1][1].add("b")
    inner[1][0].zero_()
    inner.append(3)
    held["inner"] = held["more"] = 7
    memory.values.append(2.0)
    queue.append(3)
    kept.restore()

    assert held == {"inner": inner, "memory": memory}
    assert held["inner"] is inner
    assert len(inner) == 2
    assert view.tolist() == [1.0, 2.0]
    assert inner[1][0].tolist() == [1.0, 1.0]
    assert inner[1][1] == {"a"}
    assert memory.values == [1.0]
    assert list(queue) == [1, 2]


def updater_of(optimizer: OptimizerFactory, **settings: Any) -> Updater:
    """Of a small layer, always the same."""
    torch.manual_seed(4)
    module = nn.Linear(5, 3)
    return Updater(dict(module.named_parameters()), Settings(optimizer, **settings))


def give_gradients(updater: Updater, seed: int) -> None:
    """Other ones for each seed."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in updater.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=rng)


def rates(optimizer: torch.optim.Optimizer) -> SequentialLR:
    """A schedule of schedules, which changes hands at the third update."""
    parts = [LinearLR(optimizer, 0.1, total_iters=2), StepLR(optimizer, 2)]
    return SequentialLR(optimizer, parts, milestones=[2])


def state_of(updater: Updater) -> list[Tensor]:
    """All that the next update depends on."""
    assert updater.optimizer is not None
    assert updater.scheduler is not None
    found: list[Any] = [*updater.parameters.values(), *(updater.ema or {}).values()]
    found += [group["lr"] for group in updater.optimizer.param_groups]
    found += updater.scheduler.get_last_lr()
    return [torch.as_tensor(x).clone() for x in found]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_undone_update_leaves_nothing_behind(name: str) -> None:
    """Of weights, averages, schedule and gradients; the next ones are as without it."""
    plain, doubting = (
        updater_of(OPTIMIZERS[name], scheduler=rates, ema_decay=0.5) for _ in range(2)
    )
    for step in range(6):
        give_gradients(plain, step)
        torch.manual_seed(step)
        plain.update()

        give_gradients(doubting, step)
        torch.manual_seed(step)
        doubting.doubt()
        doubting.update()
        assert doubting.grads == []
        if step % 3:
            torch.manual_seed(99)  # what else draws meanwhile has no influence
            doubting.undo()
            doubting.update()
        else:
            doubting.confirm()
        pairs = zip(state_of(plain), state_of(doubting), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), step


def test_an_update_that_is_not_made_again_draws_nothing() -> None:
    """A step that is undone and skipped leaves the next one its own random numbers."""
    plain, doubting = (updater_of(OPTIMIZERS["odd"], scheduler=rates) for _ in range(2))
    torch.manual_seed(1)
    give_gradients(doubting, 1)
    doubting.doubt()
    doubting.update()
    doubting.undo()
    doubting.forget()
    for updater in (plain, doubting):
        torch.manual_seed(2)
        give_gradients(updater, 2)
        updater.update()
    pairs = zip(state_of(plain), state_of(doubting), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_gradients_come_back_as_they_were() -> None:
    """Also where the optimizer computed in them, and where there was none."""
    updater = updater_of(OPTIMIZERS["odd"])
    give_gradients(updater, 1)
    updater.parameters["bias"].grad = None
    (before,) = (grad.clone() for grad in updater.grads)
    updater.doubt()
    updater.update()
    updater.undo()
    (after,) = updater.grads
    assert torch.equal(after, before)
    assert updater.parameters["bias"].grad is None


def test_averages_move_when_the_update_is_confirmed() -> None:
    """Not before: so they need no copy."""
    updater = updater_of(OPTIMIZERS["adamw"], ema_decay=0.5)
    assert updater.ema is not None
    first = updater.ema["weight"].clone()
    give_gradients(updater, 1)
    updater.doubt()
    updater.update()
    assert torch.equal(updater.ema["weight"], first)
    updater.confirm()
    assert not torch.equal(updater.ema["weight"], first)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers_pass_the_check(name: str) -> None:
    """It leaves the weights, their gradients and the random numbers alone."""
    module = nn.Linear(5, 3)
    before, random = module.weight.detach().clone(), torch.get_rng_state()
    check_undo(dict(module.named_parameters()), Settings(OPTIMIZERS[name]))
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_the_check_refuses_what_remembers_elsewhere() -> None:
    """In the variables of a function, for one."""

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        return Elsewhere(parameters, lr=1.0)

    module = nn.Linear(5, 3)
    with pytest.raises(RecipeError, match="moves weight otherwise than without it"):
        check_undo(dict(module.named_parameters()), Settings(make))
    frozen = nn.Linear(5, 3).requires_grad_(requires_grad=False)
    check_undo(dict(frozen.named_parameters()), Settings(make))


def test_the_check_refuses_a_schedule_that_remembers_elsewhere() -> None:
    """An undone update would have moved it on; one that only reads may stay."""

    def check(scheduler: SchedulerFactory) -> None:
        named = dict(nn.Linear(5, 3).named_parameters())
        check_undo(named, Settings(OPTIMIZERS["adamw"], scheduler=scheduler))

    with pytest.raises(RecipeError, match="or its learning-rate schedule, remembers"):
        check(lambda optimizer: LambdaLR(optimizer, Counting()))
    check(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step))
    check(rates)


def test_a_rate_of_0_hides_nothing_from_the_check() -> None:
    """The optimizer is tried without its schedule, too."""

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        return Elsewhere(parameters, lr=1.0)

    named = dict(nn.Linear(5, 3).named_parameters())
    settings = Settings(make, scheduler=lambda o: LambdaLR(o, lambda step: 0.0))
    with pytest.raises(RecipeError, match="moves weight otherwise than without it"):
        check_undo(named, settings)
