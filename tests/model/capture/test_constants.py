"""What follows from shapes alone may be looked at; what follows from data may not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import CaptureError
from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut

X = torch.randn(4, 3)


class Looks(nn.Module):
    """Makes a mask, and goes the way that it says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def mask(self, x: Tensor) -> Tensor:
        """Of shape (3, 3)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        mask = self.mask(y)
        if bool((mask == mask.tril()).all()):
            y = y + int(mask.sum().item())
        return y


class OfShape(Looks):
    """Known, though it is changed in place, through a view."""

    def mask(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1])
        mask[0].fill_(0)
        return mask.tril()


class OfWeights(Looks):
    """Not known."""

    def mask(self, x: Tensor) -> Tensor:
        return self.linear.weight.detach()


class OfData(Looks):
    """Not known: a constant at first, then written to."""

    def mask(self, x: Tensor) -> Tensor:
        mask = torch.ones(3, 3)
        mask[0] = x[0]
        return mask


class OfSamples(Looks):
    """Not known: as large as the batch."""

    def mask(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[0], x.shape[0])


def test_constants_may_be_looked_at() -> None:
    """The captured model goes the same way, and adds the same number."""
    model = OfShape()
    (stage,) = cut(capture(model, (X,)), ())

    assert torch.equal(stage(X), model(X))
    assert torch.equal(stage(X) - model.linear(X), torch.full((4, 3), 5.0))


@pytest.mark.parametrize("model", [OfWeights, OfData])
def test_data_may_not(model: type[Looks]) -> None:
    """Nor what was made with it; the line is named."""
    with pytest.raises(CaptureError, match=r"aten\.(item|is_nonzero).*\n.*if bool\("):
        capture(model(), (X,))


def test_what_grows_with_the_samples_fixes_them() -> None:
    """It is not the same for every batch."""
    captured = capture(OfSamples(), (X,))

    assert not captured.any_batch


def test_tensors_look_as_before() -> None:
    """Nothing is left behind of what answers while a model is captured."""
    before = {name: getattr(Tensor, name) for name in ("__bool__", "item")}

    capture(OfShape(), (X,))

    assert {name: getattr(Tensor, name) for name in before} == before
