"""Optimizers and learning rates are what the recipe says."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hocket.recipes.optimizer import (
    learning_rate_share,
    make_optimizer,
    make_scheduler,
)
from hocket.recipes.recipe import AdamwSettings, SgdSettings


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
    """For whoever wants no schedule."""
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
