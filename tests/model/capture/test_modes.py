"""A model is exported once where its graph cannot depend on a module's mode."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.model.capture import capture as capture_file
from hocket.model.capture.capture import capture


class Plain(nn.Module):
    """Reads no mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return self.norm(torch.tanh(self.inner(x)))


class Asks(Plain):
    """Reads its mode by name."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training."""
        return F.dropout(self.inner(x), 0.5, getattr(self, "train" + "ing"))


def is_training(module: nn.Module) -> bool:
    """Outside of any class."""
    return module.training


class AsksAnother(Plain):
    """Reads the mode of a module that it has."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale in training."""
        return self.inner(x) * (2.0 if is_training(self.norm) else 1.0)


class LooksInside(Plain):
    """Reads it where attributes are kept."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale in training."""
        return self.inner(x) * (2.0 if vars(self)["training"] else 1.0)


class HasItsOwn(Plain):
    """Hides the modules' attribute behind one of the class."""

    training = True

    def forward(self, x: Tensor) -> Tensor:
        """Scale in training."""
        return self.inner(x) * (2.0 if self.training else 1.0)


class SetsMore(Plain):
    """Does more when its mode is set."""

    factor = 1.0

    def train(self, mode: bool = True) -> SetsMore:
        """Set the factor, too."""
        self.factor = 2.0 if mode else 1.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """Scale in training."""
        return self.inner(x) * self.factor


READING = [Asks, AsksAnother, LooksInside, HasItsOwn, SetsMore]


def exports_once(model: nn.Module) -> bool:
    """Whether both modes have one trace."""
    found = capture(model, (torch.randn(6, 4),), capture="export")
    return found.training.trace is found.evaluation.trace


def test_one_export_where_no_mode_is_read() -> None:
    """And nothing of the watch stays behind."""
    assert exports_once(Plain())
    assert not exports_once(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert "training" not in vars(nn.Module)
    assert not capture_file._WATCHES


@pytest.mark.parametrize("kind", READING)
def test_however_a_mode_is_read(kind: type[Plain]) -> None:
    """By name, by a function, of a part, as an entry; or what stands for it."""
    assert not exports_once(kind())


def test_captures_in_several_threads() -> None:
    """One that ends, or begins, in between does not hide what another reads."""
    kinds = [Plain, Asks, AsksAnother, Plain] * 4
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_watched, kinds))
    assert "training" not in vars(nn.Module)


def _watched(kind: type[Plain]) -> None:
    model, x = kind().double(), torch.randn(6, 4).double()
    for _ in range(20):
        with capture_file._read_modes(model) as read:
            model(x)
        assert bool(read) is (kind is not Plain)
