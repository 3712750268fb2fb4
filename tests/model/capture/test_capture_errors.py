"""What cannot be captured is an error that names the place and the way out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hocket.errors import CaptureError
from hocket.model.capture.capture import capture
from hocket.model.capture.sequential import is_plain_sequential
from tests.model.support.custom_backward import Doubled

X = torch.randn(5, 4)


class Base(nn.Module):
    """One layer, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor


class Branches(Base):
    """Python decides by the data."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:
            y = y + 1
        return y


class Custom(Base):
    """Uses a custom autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return y


class Recomputes(Base):
    """A graph would keep what activation checkpointing is to throw away."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.linear, x, use_reentrant=True)
        return y


class Remembers(Base):
    """Keeps state in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.last
        self.last = y.mean(0)
        return y


class ChangesInput(Base):
    """Works in place on what every stage reads."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        y: Tensor = self.linear(x)
        return y


class UsesNumpy(Base):
    """Leaves PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.linear(x).detach().numpy())


@pytest.mark.parametrize(
    ("model", "what", "line"),
    [
        (Branches, "operation aten.item", "if y.sum() > 0:"),
        (UsesNumpy, "numpy", "torch.from_numpy"),
        (
            Custom,
            "Doubled is a custom autograd function",
            "Doubled.apply(self.linear(x))",
        ),
        (Recomputes, "it calls torch.utils.checkpoint", "checkpoint(self.linear, x"),
        (Remembers, "plain attribute self.last", "register_buffer"),
        (ChangesInput, "changes its input x in place", "work on a copy"),
    ],
)
def test_names_what_and_where(model: type[nn.Module], what: str, line: str) -> None:
    """Silent in torch.export: the custom backward, the attribute, the input."""
    with pytest.raises(CaptureError) as error:
        capture(model(), (X,))

    assert what in str(error.value)
    assert line in str(error.value)


def test_names_the_other_way() -> None:
    """An nn.Sequential of the submodules is run as it is."""
    with pytest.raises(CaptureError, match=r"nn\.Sequential of the model's submodules"):
        capture(Branches(), (X,))

    assert len(capture(nn.Sequential(nn.Linear(4, 4), Branches()), (X,)).layers) == 2


def test_sequential_means_nn_sequential() -> None:
    """Other modules have a forward of their own."""
    with pytest.raises(CaptureError, match="a Branches is no"):
        capture(Branches(), (X,), capture="sequential")


def test_a_sequential_takes_one_argument() -> None:
    """As when it is called uncut."""
    with pytest.raises(CaptureError, match=r"exactly one .* has 2 and .* \['n'\]"):
        capture(nn.Sequential(nn.Linear(4, 4)), (X, X), {"n": 1})


@pytest.mark.parametrize(
    "hook",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_sequential_with_hooks_is_more_than_its_children(hook: str) -> None:
    """Run one after the other, they would not call it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert is_plain_sequential(model)
    getattr(model, hook)(lambda *_: None)
    assert not is_plain_sequential(model)
