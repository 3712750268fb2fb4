"""What code decides by the number of samples: for which numbers its graph is right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture

EXAMPLE: Final = 4
MOST: Final = 30


class Net(nn.Module):
    """Computes something else where a condition on the number of samples holds."""

    def __init__(self, asks: Callable[[int], bool]) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(6, 3), asks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if self.asks(x.shape[0]) else y


def right(model: nn.Module) -> set[int]:
    """The numbers of samples that the captured model takes."""
    sizes = capture(model, (torch.ones(EXAMPLE, 6),)).right_for[True]
    return {n for n in range(1, MOST) if not sizes.fault_of_samples(n)}


@pytest.mark.parametrize(
    "asks",
    [
        lambda n: n == 1,
        lambda n: n < 3,
        lambda n: n > 8,
        lambda n: n < 2 or n > 9,
        lambda n: n % 3 and n != 6,
        lambda n: n in (1, 5, 7),
        lambda n: (n & 1) == 0,
        lambda n: (n >> 1) > 2,
        lambda n: n // 2 > 3,
        lambda n: n**2 > 20,
        lambda n: 2**n > 10,
        lambda n: 1 / n > 0.3,
        lambda n: max(n, 3) > 3,
        lambda n: round(n / 2) > 3,
        lambda n: math.ceil(n / 4) > 1,
    ],
)
def test_those_that_decide_as_the_example_are_right(asks: Callable[[int], Any]) -> None:
    """And no others, one sample among them."""
    alike = {n for n in range(1, MOST) if bool(asks(n)) == bool(asks(EXAMPLE))}
    assert right(Net(asks)) == alike


@pytest.mark.parametrize(
    "asks",
    [lambda n: math.sqrt(n) > 2.5, lambda n: int(n) > 4, lambda n: [1] * int(n)],
)
def test_what_makes_a_number_of_a_size_fixes_it(asks: Callable[[int], Any]) -> None:
    """No graph has it then for others."""
    assert right(Net(asks)) == {EXAMPLE}


class Ways(nn.Module):
    """Does for one sample what `way` says; two layers."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.way = nn.Linear(6, 3), nn.Linear(3, 2), way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return self.head(self.way(y) if x.shape[0] == 1 else y)


@pytest.mark.parametrize(
    "way",
    [
        lambda y: y.expand(1, -1),  # the same view
        lambda y: y + 0,
        lambda y: torch.ones(1, 1) @ y,
    ],
)
def test_one_sample_may_go_another_way_to_the_same(
    way: Callable[[Tensor], Tensor],
) -> None:
    """By its operators, or by its outputs and gradients."""
    assert right(Ways(way)) == set(range(1, MOST))


@pytest.mark.parametrize(
    "way",
    [
        Tensor.detach,  # the same outputs, and no gradient for the first layer
        lambda y: y.detach() / 2 + y / 2,
        lambda y: y * 1.01,
        lambda y: y[:, [1, 0, 2]],
    ],
)
def test_one_sample_that_leads_elsewhere_is_refused(
    way: Callable[[Tensor], Tensor],
) -> None:
    """In its outputs, or in its gradients alone."""
    model = Ways(way)
    called: list[object] = []
    model.layer.register_full_backward_hook(lambda *seen: called.append(seen))
    assert right(model) == set(range(2, MOST))
    assert not called
    assert all(x.grad is None for x in model.parameters())


def test_pythons_generator_goes_on_as_it_was() -> None:
    """What the model draws while it is looked at is drawn again."""
    model = Ways(lambda y: y * random.random())
    random.seed(3)
    expected = random.Random(3).random()
    assert right(model) == set(range(2, MOST))
    assert random.random() == expected


class Number(nn.Module):
    """Reads a number that follows from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (x.sum() > 0).long().item()


def test_numbers_of_the_data_are_no_sizes() -> None:
    """They have no smallest one."""
    assert right(Number()) == set(range(1, MOST))
