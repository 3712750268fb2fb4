"""Weight prediction: what forwards read is where the optimizer is going."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater
from tests.run.weights.correction.one_weight import MakeOptimizer, descent, train

LR = 0.1


def of_torch(name: str, **options: Any) -> MakeOptimizer:
    """One of torch's optimizers."""
    return lambda p: getattr(torch.optim, name)(p, lr=LR, **options)


# By their state, the first four; by their last update, the others.
OPTIMIZERS = {
    "momentum": of_torch("SGD", momentum=0.9),
    "decayed": of_torch("SGD", momentum=0.5, dampening=0.3, weight_decay=0.1),
    "adam": of_torch("Adam", betas=(0.5, 0.75)),
    "adam-decayed": of_torch("Adam", weight_decay=0.1, maximize=True),
    "plain": of_torch("SGD"),
    "amsgrad": of_torch("AdamW", amsgrad=True),
    "rmsprop": of_torch("RMSprop", momentum=0.9),
    "adamax": of_torch("Adamax"),
}


def test_a_few_updates_by_hand() -> None:
    """Half of the read weight off; what is read goes on as the last update went."""
    settings = TrainingConfig(optimizer=descent(0.5), correction="weight-prediction")
    course = train(settings, 1, 4)
    # W1 = 1 - 1/2, read 0;  W2 = 1/2 - 1/2 (of W0 again), read -1/2;  W3 = W2 - 0 ...
    assert course.weights == [1.0, 0.5, 0.0, 0.0, 0.25]
    assert course.reads == [1.0, 0.0, -0.5, 0.0]


def updates_of(
    make: MakeOptimizer, delay: int, scheduler: Any = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Weights before and after some updates, and what is predicted from there."""
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    settings = TrainingConfig(
        optimizer=make, scheduler=scheduler, correction="weight-prediction"
    )
    updater = Updater({"w": weight}, settings, delay=delay)
    first = updater.predicted()
    assert first is not None
    assert torch.equal(first["w"], weight)
    assert first["w"].data_ptr() != weight.data_ptr()
    found = []
    for _ in range(6):
        before = weight.detach().clone()
        weight.grad = torch.randn_like(weight)
        updater.update()
        predicted = updater.predicted()
        assert predicted is not None
        found.append((before, weight.detach().clone(), predicted["w"]))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("delay", [1, 3])
def test_it_goes_on_as_the_last_update_went(name: str, delay: int) -> None:
    """`W + d * (W - previous W)`, whether it is read from the state or noted."""
    for before, after, predicted in updates_of(OPTIMIZERS[name], delay):
        expected = after + delay * (after - before)
        torch.testing.assert_close(predicted, expected, rtol=1e-10, atol=1e-12)


def test_nesterov_goes_on_along_its_momentum() -> None:
    """Not along its last update, which stands on the last gradient alone."""
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(5))
    make = of_torch("SGD", momentum=0.9, nesterov=True)
    settings = TrainingConfig(optimizer=make, correction="weight-prediction")
    updater = Updater({"w": weight}, settings, delay=2)
    moved = torch.zeros(5)
    for _ in range(4):
        weight.grad = torch.randn(5)
        moved = 0.9 * moved + weight.grad
        updater.update()
        predicted = updater.predicted()
        assert predicted is not None
        torch.testing.assert_close(predicted["w"], weight.detach() - 2 * LR * moved)


def test_decoupled_decay_is_foreseen() -> None:
    """AdamW pulls at the weights that there are by then, by `lr * decay * W`."""
    make = of_torch("AdamW", weight_decay=0.5)
    straight = of_torch("AdamW", weight_decay=0.0)
    torch.manual_seed(3)
    found = {}
    for key, maker in (("decayed", make), ("straight", straight)):
        weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        settings = TrainingConfig(optimizer=maker, correction="weight-prediction")
        updater = Updater({"w": weight}, settings, delay=2)
        weight.grad = torch.ones_like(weight)
        updater.update()
        predicted = updater.predicted()
        assert predicted is not None
        found[key] = predicted["w"] - weight.detach()
        if key == "decayed":
            pull = -2 * LR * 0.5 * weight.detach()
    torch.testing.assert_close(found["decayed"] - found["straight"], pull)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_it_takes_the_next_rate(name: str) -> None:
    """The schedule has stepped: later updates are not as large as the last one."""

    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    for before, after, predicted in updates_of(OPTIMIZERS[name], 2, halving):
        expected = after + 2 * 0.5 * (after - before)
        torch.testing.assert_close(predicted, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("make", [descent(LR), of_torch("Adam")])
def test_steady_updates_are_foreseen_exactly(make: MakeOptimizer, delay: int) -> None:
    """What a step reads is then what its gradient is applied to."""
    settings = TrainingConfig(optimizer=make, correction="weight-prediction")
    course = train(settings, delay, 30, slope=lambda _: 0.25)
    for t in range(1, 30 - delay):
        assert course.reads[t] == pytest.approx(course.weights[t + delay], rel=1e-6)


def of_first_two(make: MakeOptimizer) -> TrainingConfig:
    """With an optimizer that is given no more than these."""
    return TrainingConfig(
        optimizer=lambda p: make(p[:2]), correction="weight-prediction"
    )


def test_what_is_not_updated_is_read_as_it_is() -> None:
    """A weight without a gradient, and one that the optimizer was not given."""
    weights = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    for make in (OPTIMIZERS["adam"], OPTIMIZERS["rmsprop"]):
        updater = Updater(weights, of_first_two(make), delay=1)
        weights["a"].grad = torch.ones(2)
        updater.update()
        predicted = updater.predicted()
        assert predicted is not None
        assert not torch.equal(predicted["a"], weights["a"])
        for name in "bc":
            assert torch.equal(predicted[name], weights[name])
