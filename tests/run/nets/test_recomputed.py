"""A forward that is run again changes, and draws, what it did the first time."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(120)

BEGINS: Final = 7  # forwards after which something happens, so that no capture sees it
NUM_STEPS: Final = 6
CALLS: Final[list[int]] = []


class Layer(nn.Module):
    """Calls a function after some forwards, and multiplies by what it returns."""

    num: Tensor

    def __init__(self, factor: Callable[[Any], float]) -> None:
        super().__init__()
        self.register_buffer("num", torch.zeros((), dtype=torch.long))
        self.given = (factor,)
        self.count = 0
        self.log: list[float] = []
        self.settings = SimpleNamespace(count=0)
        self.held = torch.ones(())
        self.last: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The input, times a number."""
        if self.training:
            self.num += 1
            if self.num > BEGINS:
                return x * self.given[0](self)
        return x


def of_count(layer: Layer) -> float:
    """A number that the layer counts up."""
    layer.count += 1
    return 1.0 + layer.count / 10


def of_log(layer: Layer) -> float:
    """A list that grows, and a dict that is made."""
    layer.log.append(1.0 + len(layer.log) / 10)
    layer.last = {"factor": layer.log[-1]}
    return layer.last["factor"]


def of_python(_: Layer) -> float:
    """Of Python's random numbers."""
    return 1.0 + random.random()


def of_numpy(_: Layer) -> float:
    """Of NumPy's."""
    return 1.0 + float(np.random.rand())


def of_settings(layer: Layer) -> float:
    """A number in an object of the layer's."""
    layer.settings.count += 1
    return 1.0 + layer.settings.count / 10


def of_script(_: Layer) -> float:
    """A list of the script's."""
    CALLS.append(len(CALLS))
    return 1.0 + len(CALLS) / 10


def of_tensor(layer: Layer) -> float:
    """A tensor that is no buffer, changed in place."""
    layer.held += 0.1
    return float(layer.held)


def net_of(factor: Callable[[Any], float]) -> nn.Sequential:
    """With a layer of its own code in the middle."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), Layer(factor), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """One for each step."""
    rng = torch.Generator().manual_seed(1)
    made = [torch.randn(6, 6, generator=rng).double() for _ in range(NUM_STEPS)]
    return [(x[:, :4], x[:, 4:]) for x in made]


def seed_numbers() -> None:
    """As a script does at its beginning."""
    random.seed(3)
    np.random.seed(3)


def recomputed_losses(
    net: nn.Module, schedule: str = "1f1b", recompute: str = "all"
) -> list[float]:
    """Of a pipeline that runs all forwards again, two microbatches in each step."""
    batches = make_batches()
    with started(
        net,
        nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, 0.1),
        batches[0],
        num_microbatches=2,
        schedule=schedule,
        recompute=recompute,
    ) as pipeline:
        seed_numbers()
        return [result.loss for result in pipeline.train(batches)]


@pytest.mark.parametrize("factor", [of_count, of_log, of_python, of_numpy])
def test_a_second_run_begins_where_the_first_did(
    factor: Callable[[Any], float],
) -> None:
    """They were counted and drawn again: gradients were 1 to 3 % off without a word."""
    net = net_of(factor)
    plain = copy.deepcopy(net)
    found = recomputed_losses(net)

    seed_numbers()
    sgd, expected = torch.optim.SGD(plain.parameters(), 0.1), list[float]()
    for x, y in make_batches():
        sgd.zero_grad()
        total = 0.0
        # As 1f1b: each microbatch's backward comes before the next one's forward.
        for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = nn.functional.mse_loss(plain(inputs), targets) / 2
            loss.backward()
            total += loss.item()
        sgd.step()
        expected.append(total)
    assert found == pytest.approx(expected, rel=1e-10)
    layer, own = plain[2], net[2]
    assert isinstance(layer, Layer)
    assert isinstance(own, Layer)
    assert (own.count, own.log) == (layer.count, layer.log)


@pytest.mark.parametrize(
    ("factor", "name"),
    [(of_settings, "settings.count"), (of_script, "CALLS"), (of_tensor, "Layer.held")],
)
def test_what_would_change_twice_is_refused(
    factor: Callable[[Any], float], name: str
) -> None:
    """At the step in which it happens, with the ways out."""
    CALLS.clear()
    with pytest.raises(ModelError, match="would do so twice") as error:
        recomputed_losses(net_of(factor))
    assert name in str(error.value)
    assert 'recompute="none"' in str(error.value)


def test_old_weights_are_no_change() -> None:
    """With steps that overlap, a second run finds them in the place of new ones."""
    again, once = (
        recomputed_losses(net_of(of_count), "pipedream-2bw", how)
        for how in ("all", "none")
    )
    assert again == once
