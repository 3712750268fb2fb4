"""What a loop changes under compiled stages is followed: they run uncompiled then."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.run.stage.compiled.function import CompileWarning
from tests.run.support.started import started


class Scale(nn.Module):
    """An attribute that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x * self.factor


def factor(net: nn.Sequential, step: int) -> None:
    """A number of a module."""
    net.get_submodule("1").factor = 1.0 + step  # type: ignore[assignment]


def rate(net: nn.Sequential, step: int) -> None:
    """All or nothing is dropped, so that no numbers count."""
    net.get_submodule("2").p = float(step == 1)  # type: ignore[assignment]


def lengths(_net: nn.Sequential, _step: int) -> None:
    """Nothing: batches differ."""


def make_batches(change: Callable[..., None]) -> list[tuple[Tensor, Tensor]]:
    """Eight samples of some words each."""
    rng = torch.Generator().manual_seed(0)
    sizes = (3, 5, 4) if change is lengths else (3, 3, 3)
    return [
        (
            torch.randn(8, size, 6, generator=rng).double(),
            torch.randn(8, size, 3, generator=rng).double(),
        )
        for size in sizes
    ]


def sgd(weights: Any) -> torch.optim.Optimizer:
    """Plain, so that gradients show."""
    return torch.optim.SGD(weights, 0.1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("change", [factor, rate, lengths])
def test_a_change_is_followed(change: Callable[[nn.Sequential, int], None]) -> None:
    """Past bug: in an nn.Sequential, compiled stages went on as they had been."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), Scale(), nn.Dropout(0.0), nn.Linear(8, 3)
    ).double()
    plain, loss = copy.deepcopy(net), nn.functional.mse_loss
    batches, step = make_batches(change), sgd(plain.parameters())
    losses, found = [], []
    with (
        warnings.catch_warnings(record=True, action="always") as warned,
        started(net, loss, sgd, batches[0], compile=True) as pipeline,
    ):
        for i, (x, y) in enumerate(batches):
            for one in (net, plain):
                change(one, i)
            step.zero_grad()
            whole = loss(plain(x), y)
            whole.backward()
            step.step()
            losses.append(whole.item())
            found.append(pipeline.step((x, y)).loss)
    assert found == pytest.approx(losses, rel=1e-10)
    texts = [str(x.message) for x in warned if x.category is CompileWarning]
    # Other lengths run uncompiled, and those of the example go on as they were.
    assert ["runs uncompiled from now on" in x for x in texts] == (
        [] if change is lengths else [True]
    )
