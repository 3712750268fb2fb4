"""Optimizers and learning rates are what the recipe says."""

from __future__ import annotations

from itertools import pairwise
from math import isclose
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hocket.recipes.config.sections import (
    AdafactorSettings,
    AdamwSettings,
    AnyOptimizer,
    LarsSettings,
    SgdSettings,
)
from hocket.recipes.training.optimizer import (
    learning_rate_share,
    make_optimizer,
    make_scheduler,
)
from hocket.teacher.lars import Lars


@given(
    warmup=st.integers(0, 50),
    more=st.integers(2, 100),
    final=st.floats(0, 1),
)
def test_the_learning_rate_rises_and_falls_once(
    warmup: int, more: int, final: float
) -> None:
    """To its highest when the warm-up ends, then down, never below the final share."""
    settings = AdamwSettings(
        kind="adamw", num_warmup_steps=warmup, final_fraction=final
    )
    num_steps = warmup + more
    share = learning_rate_share(settings, num_steps)
    shares = [share(step) for step in range(num_steps)]

    assert all(a < b for a, b in pairwise(shares[: warmup + 1]))
    assert isclose(shares[warmup], 1.0)
    assert all(a >= b - 1e-12 for a, b in pairwise(shares[warmup:]))
    assert shares[0] > 0
    assert all(s >= final - 1e-12 for s in shares[warmup:])
    assert isclose(share(num_steps), final, abs_tol=1e-12)


def test_halfway_down_the_cosine_is_the_mean() -> None:
    """A closed form: (1 + final) / 2 in the middle."""
    settings = SgdSettings(kind="sgd", final_fraction=0.2)
    assert isclose(learning_rate_share(settings, 100)(50), 0.6)


def test_a_final_fraction_of_one_is_a_constant() -> None:
    """Without a schedule the rate stays as it is."""
    settings = SgdSettings(kind="sgd", final_fraction=1.0)
    share = learning_rate_share(settings, 10)
    assert {share(step) for step in range(10)} == {1.0}


def test_each_value_reaches_the_optimizer() -> None:
    """Every key of [optimizer] is found in the optimizer's own options."""
    parameters = [nn.Parameter(torch.zeros(2))]
    adamw = make_optimizer(
        AdamwSettings(
            kind="adamw", learning_rate=0.1, weight_decay=0.2, beta1=0.3, beta2=0.4
        )
    )(parameters)
    sgd = make_optimizer(
        SgdSettings(kind="sgd", learning_rate=0.5, weight_decay=0.6, momentum=0.7)
    )(parameters)

    assert type(adamw) is torch.optim.AdamW
    assert type(sgd) is torch.optim.SGD
    assert adamw.defaults["lr"] == 0.1
    assert adamw.defaults["weight_decay"] == 0.2
    assert adamw.defaults["betas"] == (0.3, 0.4)
    assert sgd.defaults["lr"] == 0.5
    assert sgd.defaults["weight_decay"] == 0.6
    assert sgd.defaults["momentum"] == 0.7


@pytest.mark.filterwarnings("error")
def test_the_scheduler_follows_the_shares() -> None:
    """Stepped once per update, each update uses its own step's learning rate."""
    settings = SgdSettings(kind="sgd", learning_rate=2.0, num_warmup_steps=3)
    share = learning_rate_share(settings, 8)
    optimizer = make_optimizer(settings)([nn.Parameter(torch.zeros(2))])
    scheduler = make_scheduler(share)(optimizer)
    for step in range(8):
        assert isclose(optimizer.param_groups[0]["lr"], 2.0 * share(step))
        optimizer.step()
        scheduler.step()


def test_halfway_down_the_line_is_the_same_mean() -> None:
    """And a quarter of the way, a quarter."""
    settings = SgdSettings(kind="sgd", final_fraction=0.2, fall="linear")
    share = learning_rate_share(settings, 100)
    assert isclose(share(50), 0.6)
    assert isclose(share(25), 0.8)


KINDS: Final[tuple[AnyOptimizer, ...]] = (
    AdamwSettings(kind="adamw", weight_decay=0.1, weight_decay_on="matrices"),
    SgdSettings(kind="sgd", weight_decay=0.1, weight_decay_on="matrices"),
    LarsSettings(kind="lars", weight_decay=0.1, weight_decay_on="matrices"),
    AdafactorSettings(kind="adafactor", weight_decay=0.1, weight_decay_on="matrices"),
)


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.kind)
def test_biases_and_norms_are_spared(settings: AnyOptimizer) -> None:
    """Where no gradient leads anywhere, matrices shrink and vectors stay."""
    matrix, bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(settings)([matrix, bias])
    for parameter in (matrix, bias):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    assert (matrix < 1).all()
    assert (bias == 1).all()
    assert len(optimizer.param_groups) == 2
    for one in (matrix, bias):  # a stage may have only such ones
        assert len(make_optimizer(settings)([one]).param_groups) == 1


def far(weight: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """A bowl."""
    return (weight - goal).square().sum()


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.kind)
def test_every_optimizer_finds_the_bottom(settings: AnyOptimizer) -> None:
    """Of a bowl: each is wired to its learning rate and its gradients."""
    torch.manual_seed(0)
    goal = torch.randn(4, 3)
    weight = nn.Parameter(torch.zeros(4, 3).normal_())
    changed = settings.model_copy(
        update={"learning_rate": 0.05, "weight_decay": 0.0, "weight_decay_on": "all"}
    )
    if isinstance(changed, LarsSettings):
        changed = changed.model_copy(update={"trust": 0.1})
    optimizer = make_optimizer(changed)([weight])
    first = far(weight, goal).item()
    for _ in range(200):
        optimizer.zero_grad()
        far(weight, goal).backward()
        optimizer.step()
    assert far(weight, goal).item() < first / 10


def test_more_values_reach_the_optimizers() -> None:
    """Those of the kinds that came later."""
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    lars = make_optimizer(
        LarsSettings(
            kind="lars", learning_rate=0.1, weight_decay=0.2, momentum=0.3, trust=0.4
        )
    )(parameters)
    adafactor = make_optimizer(
        AdafactorSettings(
            kind="adafactor", learning_rate=0.1, beta2_decay=-0.5, update_clip=2.0
        )
    )(parameters)
    adamw = make_optimizer(AdamwSettings(kind="adamw", epsilon=0.25))(parameters)
    sgd = make_optimizer(SgdSettings(kind="sgd", momentum=0.5, nesterov=True))(
        parameters
    )

    assert type(lars) is Lars
    assert lars.defaults == {
        "lr": 0.1,
        "weight_decay": 0.2,
        "momentum": 0.3,
        "trust": 0.4,
        "decays_vectors": True,
    }
    assert type(adafactor) is torch.optim.Adafactor
    assert adafactor.defaults["lr"] == 0.1
    assert adafactor.defaults["beta2_decay"] == -0.5
    assert adafactor.defaults["d"] == 2.0
    assert adamw.defaults["eps"] == 0.25
    assert sgd.defaults["nesterov"]
