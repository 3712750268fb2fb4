"""How large learning rates may be on a parabola: what the docs say of a delay."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hocket

NUM_UPDATES = 500
MARGIN = 0.05


def half_square(output: Tensor, _: Tensor) -> Tensor:
    """A parabola of curvature 1."""
    return output.square().mean() / 2


def last_losses(rate: float, momentum: float, delay: int) -> float:
    """The largest of the last losses, of a weight that begins at 1."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    one = torch.ones(1, 1, dtype=torch.float64)
    history = hocket.emulate(
        hocket.Program.chain([0], 1, delays=[delay]),
        model,
        half_square,
        partial(torch.optim.SGD, lr=rate, momentum=momentum),
        [(one, one)] * NUM_UPDATES,
    )
    return max(losses["loss"] for losses in history[-30:])


@pytest.mark.parametrize(
    ("momentum", "delay", "limit"),
    [
        *((0.0, d, limit) for d, limit in enumerate((2.0, 1.0, 0.618, 0.445))),
        *((0.9, d, limit) for d, limit in enumerate((3.8, 0.1, 0.0513, 0.0348))),
    ],
)
def test_a_rate_is_stable_up_to_its_limit(
    momentum: float, delay: int, limit: float
) -> None:
    """A little below it the weight goes to the minimum, a little above it away."""
    assert last_losses((1 - MARGIN) * limit, momentum, delay) < 0.125
    assert last_losses((1 + MARGIN) * limit, momentum, delay) > 2.0
