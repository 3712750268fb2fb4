"""How large learning rates may be on a parabola: what the docs say of it."""

from __future__ import annotations

import pytest

from hocket.options import CorrectionName
from hocket.run.weights.settings import TrainingConfig
from tests.run.weights.correction.one_weight import descent, train

NUM_UPDATES = 500
MARGIN = 0.05

# (correction, momentum, the limit of rate times curvature for each delay from 1 on)
LIMITS: list[tuple[CorrectionName, float, tuple[float, ...]]] = [
    ("none", 0.0, (1.0, 0.618, 0.445)),
    ("error-feedback", 0.0, (0.618, 0.346, 0.239)),
    ("weight-prediction", 0.0, (0.618, 0.371, 0.266)),
    ("none", 0.9, (0.1, 0.0513, 0.0348)),
    ("error-feedback", 0.9, (0.27, 0.0973, 0.0535)),
    ("weight-prediction", 0.9, (0.27, 0.121, 0.0723)),
]


@pytest.mark.parametrize(
    ("correction", "momentum", "delay", "limit"),
    [
        (correction, momentum, delay, limit)
        for correction, momentum, limits in LIMITS
        for delay, limit in enumerate(limits, start=1)
    ],
)
def test_a_rate_is_stable_up_to_its_limit(
    correction: CorrectionName, momentum: float, delay: int, limit: float
) -> None:
    """A little below it the weight goes to the minimum, a little above it away."""
    last = []
    for rate in ((1 - MARGIN) * limit, (1 + MARGIN) * limit):
        settings = TrainingConfig(
            optimizer=descent(rate, momentum), correction=correction
        )
        weights = train(settings, delay, NUM_UPDATES).weights
        last.append(max(map(abs, weights[-30:])))
    assert last[0] < 0.5
    assert last[1] > 2.0


@pytest.mark.parametrize(
    "correction", ["error-feedback", "weight-prediction", "lr-discount"]
)
def test_with_momentum_each_is_stable_where_a_delay_alone_is_not(
    correction: CorrectionName,
) -> None:
    """At one and a half times what a delay of 1 permits."""
    make = descent(0.15, 0.9)
    plain = train(TrainingConfig(optimizer=make), 1, 300).weights
    helped = train(
        TrainingConfig(optimizer=make, correction=correction), 1, 300
    ).weights
    assert max(map(abs, plain[-30:])) > 100.0
    assert max(map(abs, helped[-30:])) < 0.1


def test_a_discount_does_not_last() -> None:
    """A rate that is too large without it is so again when it has faded."""
    settings = TrainingConfig(optimizer=descent(0.15, 0.9), correction="lr-discount")
    weights = train(settings, 1, 1600).weights
    assert max(map(abs, weights[300:330])) < 0.1
    assert max(map(abs, weights[-30:])) > max(map(abs, weights[1000:1030])) * 1e3
