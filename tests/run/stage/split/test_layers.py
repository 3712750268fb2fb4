"""For every kind of layer, I and W make the gradients of the whole backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.stages.splitter import Remainder
from hocket.model.stages.stage import StageModule
from tests.in_turns import in_turns
from tests.run.stage.split.halves import How, assert_same, halves, whole
from tests.run.stage.split.layers import AT_ONCE, LAYERS


def made(name: str, dtype: torch.dtype) -> nn.Module:
    """The layer, the same each time."""
    torch.manual_seed(1)
    return LAYERS[name].make().to(dtype)


@pytest.mark.parametrize(
    ("name", "wants_grad", "way"),
    in_turns(
        LAYERS,
        [True, False],
        [
            ("export", torch.float32),
            ("sequential", torch.float32),
            ("sequential", torch.float64),
        ],
    ),
)
def test_equals_the_backward(
    name: str, wants_grad: bool, way: tuple[How, torch.dtype]
) -> None:
    """To the last bit; and no weight has a gradient before W."""
    how, dtype = way
    inputs = LAYERS[name].inputs(wants_grad=wants_grad, dtype=dtype)

    expected = whole(made(name, dtype), inputs, how)
    actual = halves(made(name, dtype), inputs, how, between=_nothing_yet)

    assert_same(actual, expected)


def _nothing_yet(stage: StageModule, left: Remainder) -> None:
    assert left.num_bytes > 0
    assert all(p.grad is None for p in stage.parameters())


@pytest.mark.parametrize(
    ("by", "how"),
    [("layers", "export"), ("layers", "sequential"), ("graph", "sequential")],
)
@pytest.mark.parametrize("name", AT_ONCE)
def test_what_cannot_wait_is_complete_after_i(name: str, by: str, how: How) -> None:
    """Bags of embeddings, and embeddings that change their weight as they read it."""
    (words,) = AT_ONCE[name].inputs(wants_grad=False, dtype=torch.float32)
    held: list[int] = []

    def make() -> nn.Module:
        torch.manual_seed(1)
        return AT_ONCE[name].make()

    expected = whole(make(), (words,), how)
    actual = halves(
        make(),
        (words,),
        how,
        by=by,
        between=lambda _, left: held.append(left.num_bytes),
    )

    assert_same(actual, expected)
    assert held == [0]


@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_backward_under_autocast(name: str) -> None:
    """In bfloat16, with weights in float32."""
    inputs = LAYERS[name].inputs(wants_grad=True, dtype=torch.float32)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    expected = whole(made(name, torch.float32), inputs, "sequential", autocast())
    actual = halves(made(name, torch.float32), inputs, "sequential", autocast())

    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("name", "which", "by"),
    in_turns(
        ["linear", "conv2d", "transposed 2d", "bilinear"],
        ["weight", "bias", "both"],
        ["layers", "graph"],
    ),
)
def test_what_is_frozen_gets_nothing(name: str, which: str, by: str) -> None:
    """And what is left gets all of its own."""
    inputs = LAYERS[name].inputs(wants_grad=True, dtype=torch.float64)

    def frozen() -> nn.Module:
        model = made(name, torch.float64)
        for path, parameter in model.named_parameters():
            if which == "both" or path.endswith(which):
                parameter.requires_grad = False
        return model

    expected = whole(frozen(), inputs, "export")
    actual = halves(frozen(), inputs, "export", by=by)

    assert_same(actual, expected)


def test_unbatched_and_complex_inputs_are_left_to_autograd() -> None:
    """Their gradients come with I."""
    unbatched = torch.randn(4, 9, 7, requires_grad=True)
    complex_ = torch.randn(3, 4, 5, dtype=torch.complex64, requires_grad=True)
    for x, make in (
        (unbatched, partial(made, "conv2d", torch.float32)),
        (complex_, partial(Complex, 5, 7)),
    ):
        torch.manual_seed(1)
        expected = whole(make(), (x,), "sequential")
        torch.manual_seed(1)
        assert_same(halves(make(), (x,), "sequential"), expected)


class Complex(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        weight = torch.randn(num_out, num_in, dtype=torch.complex64)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ChangesItsInput(nn.Module):
    """The linear layer's input is not what it was any more when the backward comes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        out: Tensor = self.linear(y)
        y.add_(1)
        return out


def test_an_input_changed_in_place_is_refused() -> None:
    """As autograd refuses it."""
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        whole(ChangesItsInput(), (x,), "sequential")
    with pytest.raises(ModelError, match=r"input of linear, shape .3, 4., was changed"):
        halves(ChangesItsInput(), (x,), "sequential")
