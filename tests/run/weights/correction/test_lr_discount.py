"""The learning-rate discount: as large as the delay, fading, hidden from the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hocket.errors import ConfigError
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import NUM_DISCOUNTED, LrDiscount, Updater
from tests.run.weights.correction.one_weight import descent, train

LR = 0.2


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_rates_grow_to_what_was_asked_for(delay: int) -> None:
    """`lr / (1 + d) ** (1 - t / 1000)` in update `t`."""
    settings = TrainingConfig(optimizer=descent(LR), correction="lr-discount")
    w = [1.0]
    for t in range(20):
        rate = LR / (1 + delay) ** (1 - t / 1000)
        w.append(w[t] - rate * w[max(0, t - delay)])
    assert train(settings, delay, 20).weights == pytest.approx(w, rel=1e-12)


def test_it_fades_over_as_many_updates_as_are_asked_for() -> None:
    """`lr / (1 + d) ** (1 - t / n)`, and `lr` from update `n` on."""
    settings = TrainingConfig(
        optimizer=descent(LR), correction="lr-discount", num_discounted_updates=4
    )
    w = [1.0]
    for t in range(9):
        rate = LR / 3 ** max(0.0, 1 - t / 4)
        w.append(w[t] - rate * w[max(0, t - 2)])
    assert train(settings, 2, 9).weights == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_it_fades_to_nothing(lr: Any) -> None:
    """From update 1000 on the rate is the one given, bit for bit."""
    weights = []
    for correction in ("lr-discount", "none"):
        weight = nn.Parameter(torch.ones(3))
        settings = TrainingConfig(
            optimizer=lambda p: torch.optim.Adam(p, lr=lr), correction=correction
        )
        updater = Updater({"w": weight}, settings, delay=2)
        if updater.correction is not None:
            updater.correction.load_state_dict(
                {"num_updates": NUM_DISCOUNTED, "kept": {}}
            )
        weight.grad = torch.tensor([1.0, -2.0, 0.5])
        updater.update()
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_schedules_see_the_rates_that_were_given() -> None:
    """One that builds on the last rate is not discounted twice."""
    weight = nn.Parameter(torch.ones(3))
    settings = TrainingConfig(
        optimizer=descent(LR),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        correction="lr-discount",
    )
    updater = Updater({"w": weight}, settings, delay=1)
    for t in range(4):
        assert updater.optimizer is not None
        assert updater.optimizer.param_groups[0]["lr"] == LR * 0.5**t
        weight.grad = torch.ones(3)
        updater.update()


def test_a_failed_step_leaves_the_rates_alone() -> None:
    """They are put back, whatever the optimizer raises."""
    optimizer = descent(LR)([nn.Parameter(torch.ones(3))])

    def fail() -> None:
        assert optimizer.param_groups[0]["lr"] == LR / 2
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        LrDiscount(optimizer, 1).step(fail)
    assert optimizer.param_groups[0]["lr"] == LR


def test_an_optimizer_without_rates_is_refused() -> None:
    """There is nothing to discount; the error says what to take."""

    class Rateless(torch.optim.Optimizer):
        """Chooses its own rates."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": None})

    settings = TrainingConfig(optimizer=Rateless, correction="lr-discount")
    parameters = {"w": nn.Parameter(torch.ones(3))}
    with pytest.raises(ConfigError, match=r"Rateless has lr=None.*error-feedback"):
        Updater(parameters, settings, delay=1)
    assert Updater(parameters, settings).correction is None
