"""A BatchNorm that is trained over microbatches: said once, with what differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import hocket

BATCH = torch.randn(8, 4), torch.randn(8, 4)


def model(norm: Callable[[], nn.Module]) -> nn.Module:
    """Two of these layers, which do not come first."""
    layers = [nn.Linear(4, 4), norm(), nn.Linear(4, 4), norm()]
    return nn.Sequential(*layers)


def said_of(
    trained: nn.Module, caplog: pytest.LogCaptureFixture, num_microbatches: int
) -> list[str]:
    """What is logged while a pipeline is made, and trains two steps."""
    with hocket.Pipeline(
        trained,
        nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        example=BATCH,
        num_microbatches=num_microbatches,
    ) as pipeline:
        for _ in range(2):
            pipeline.step(BATCH)
    return [x.getMessage() for x in caplog.records if "BatchNorm" in x.getMessage()]


@pytest.mark.parametrize("keeps_statistics", [True, False])
def test_it_is_said_once_with_the_first_layer_and_the_ways_out(
    caplog: pytest.LogCaptureFixture, *, keeps_statistics: bool
) -> None:
    """With or without running statistics: the mean is a microbatch's."""
    norm = partial(nn.BatchNorm1d, 4, track_running_stats=keeps_statistics)
    (text,) = said_of(model(norm), caplog, 4)
    assert text.startswith("1 (BatchNorms in training mode: 2) normalises each of 4 ")
    for way_out in ("num_microbatches=1", "GroupNorm", ".eval()"):
        assert way_out in text


def test_nothing_is_said_where_nothing_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One microbatch; layers that only evaluate; other norms."""
    norm, other = partial(nn.BatchNorm1d, 4), partial(nn.GroupNorm, 2, 4)
    assert not said_of(model(norm), caplog, 1)
    assert not said_of(model(norm).eval(), caplog, 4)
    assert not said_of(model(other), caplog, 4)
