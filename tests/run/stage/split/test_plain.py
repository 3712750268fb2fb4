"""Modules that are one operator take its route at once; all others are watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hocket.run.stage.split.by_layers import ByLayers, has_own_kernel, operator_of
from tests.run.stage.split.halves import (
    assert_same,
    found,
    grad_of,
    halves,
    leaves_of,
    stage_of,
    whole,
)


class Doubled(nn.Linear):
    """A forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class Named(nn.Module):
    """Calls its layer by the argument's name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        named: Tensor = self.layer(input=x)
        return named


class Inner(nn.Linear):
    """Owns another layer, which it calls while it is watched itself."""

    def __init__(self) -> None:
        super().__init__(5, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        after: Tensor = self.last(super().forward(input))
        return after


class Read(nn.LSTM):
    """Reads the weights of its own kernel outside of it, too."""

    def __init__(self, *, extra: bool) -> None:
        super().__init__(5, 4, batch_first=True)
        self.extra = nn.Parameter(torch.randn(3, 4)) if extra else None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        said = super().forward(x)[0]
        weight = self.get_parameter("weight_ih_l0")
        said = said + F.linear(x, weight)[..., :4]
        return said if self.extra is None else F.linear(said, self.extra)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own forward": (lambda: Doubled(5, 7), (3, 5)),
    "by name": (Named, (3, 5)),
    "in another": (Inner, (3, 4, 5)),
    "normed": (lambda: weight_norm(nn.Linear(5, 7)), (3, 5)),
    "lstm": (lambda: Read(extra=False), (2, 3, 5)),
    "lstm with more": (lambda: Read(extra=True), (2, 3, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_backward(name: str) -> None:
    """To the last bit, of whatever is not one operator."""
    make, shape = MODELS[name]

    def made() -> nn.Module:
        torch.manual_seed(1)
        return make()

    torch.manual_seed(2)
    x = torch.randn(shape, requires_grad=True)
    assert_same(halves(made(), (x,), "sequential"), whole(made(), (x,), "sequential"))


def test_what_is_one_operator() -> None:
    """Of torch's own forward, and of no other."""
    own = nn.Linear(5, 7)
    own.forward = own.forward  # type: ignore[method-assign]
    plain: list[tuple[nn.Module, Any]] = [
        (nn.Linear(5, 7), F.linear),
        (nn.Conv1d(4, 6, 3), torch.conv1d),
        (nn.Conv2d(4, 6, 3, padding="same"), torch.conv2d),
        (nn.Conv3d(4, 6, 3), torch.conv3d),
    ]
    for module, operator in plain:
        known = operator_of(module)
        assert known is not None
        assert known[0] is operator
    circular = nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")
    for other in (own, Doubled(5, 7), circular, nn.Embedding(9, 5), nn.LSTM(5, 7)):
        assert operator_of(other) is None


def test_a_shape_that_changes_later_is_read_anew() -> None:
    """Stride and padding are the module's when it is called."""
    torch.manual_seed(1)
    model = nn.Conv2d(4, 6, 3)
    x = torch.randn(2, 4, 9, 7)
    stage = stage_of(model, (x,), "sequential")
    splitter = ByLayers(stage)
    model.stride = (2, 2)
    with splitter.on():
        out = splitter.module(x)
    expected = F.conv2d(x, model.weight, model.bias, 2)
    assert torch.equal(out, expected)
    _, left = splitter.input_gradients([out], [grad_of(out)], [])
    left.finish()
    actual = found(stage, leaves_of([x]))
    model.zero_grad()
    expected.backward(grad_of(out))
    assert_same(actual, found(stage, leaves_of([x])))


def test_recurrent_kernels_are_not_watched_unless_they_own_more() -> None:
    """All of their weights are read by the kernel, which has no route."""
    assert has_own_kernel(nn.GRU(5, 4, num_layers=2, bidirectional=True))
    assert has_own_kernel(Read(extra=False))
    assert not has_own_kernel(Read(extra=True))
    assert not has_own_kernel(nn.Linear(5, 4))
