"""Error feedback: an update's error is added when it is known, and nothing piles up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.run.weights.settings import TrainingConfig
from tests.run.weights.correction.one_weight import MakeOptimizer, descent, train

LR = 0.2


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Whose updates do not depend on the weights."""
    return torch.optim.Adam(parameters, lr=LR)


def test_a_few_updates_by_hand() -> None:
    """Half of the old weight off, and the error, `u(t) - u(t-1)`."""
    settings = TrainingConfig(optimizer=descent(0.5), correction="error-feedback")
    course = train(settings, 1, 5)
    # u = -0.5 -0.5 0 0.25 0, so e = -0.5 0 0.5 0.25 -0.25
    assert course.weights == [1.0, 0.0, -0.5, 0.0, 0.5, 0.25]
    assert course.reads == course.weights[:-1]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_each_error_is_added_a_delay_later(delay: int) -> None:
    """`W(t+1) = W(t) + u(t) + (u(t) - u(t-d))`, and nothing before the first."""
    settings = TrainingConfig(optimizer=descent(LR), correction="error-feedback")
    w, u = [1.0], list[float]()
    for t in range(20):
        u.append(-LR * w[max(0, t - delay)])
        w.append(w[t] + 2 * u[t] - (u[t - delay] if t >= delay else 0.0))
    assert train(settings, delay, 20).weights == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize("make", [descent(LR, 0.9), adam])
@pytest.mark.parametrize("delay", [1, 3])
def test_nothing_piles_up(make: MakeOptimizer, delay: int) -> None:
    """Of gradients that do not depend on weights, all updates count once.

    But for the last `delay` of them, which count twice.
    """
    slopes = iter([(-1.0) ** t / (1 + t) for t in range(100)] * 2)
    plain, fed = (
        train(
            TrainingConfig(optimizer=make, correction=name),
            delay,
            100,
            lambda _: next(slopes),
        )
        for name in ("none", "error-feedback")
    )
    w = plain.weights
    twice = w[-1] + (w[-1] - w[-1 - delay])
    assert fed.weights[-1] == pytest.approx(twice, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_its_weights_are_what_weight_prediction_reads(momentum: float) -> None:
    """With SGD and a delay of 1: one keeps the sum and reads ahead, one is ahead."""
    fed, foreseen = (
        train(
            TrainingConfig(optimizer=descent(LR / 2, momentum), correction=name), 1, 40
        )
        for name in ("error-feedback", "weight-prediction")
    )
    assert fed.reads == pytest.approx(foreseen.reads, rel=1e-9)
