"""State that a forward leaves for the next one is not lost in a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import CaptureError
from hocket.model.capture.capture import capture

X = torch.randn(5, 4)


class Base(nn.Module):
    """One layer, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Hidden(Base):
    """torch.export takes the branch of the first forward for all."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x if self.hidden is None else x + self.hidden)
        self.hidden = y.detach().mean(0)
        return y


class WarmsUp(Base):
    """torch.export takes the number of the first forward for all."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        y: Tensor = self.linear(x) * min(1.0, self.num_forwards / 10)
        return y


class Appends(Base):
    """In a container that stays the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.past = {"x": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.past["x"]
        self.past["x"] = self.past["x"] + 1
        return y


class Around(nn.Module):
    """Keeps it deeper inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([inner])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


@pytest.mark.parametrize(
    ("model", "name"),
    [(Hidden, "hidden"), (WarmsUp, "num_forwards"), (Appends, "past")],
)
def test_state_is_kept_or_refused_by_name(model: type[Base], name: str) -> None:
    """The graph of the model's own code would do what the first forward does."""
    for cut in ([], ["linear"]):
        with pytest.raises(CaptureError, match=f"it keeps state in {name} from"):
            capture(model(), (X,), cut=cut)
    captured = capture(Around(model()), (X,))
    assert any("layers.0" in x for x in captured.training.trace.modules.values())


class AsksAnother(nn.Module):
    """Chooses by what another module has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = WarmsUp(), nn.ModuleList([Base(), Base()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        chosen: Any = self.layers[self.first.num_forwards % 2]
        found: Tensor = chosen.linear(y)
        return found


@pytest.mark.parametrize("cut", [[], ["layers"], ["layers.1"]])
def test_code_between_modules_that_reads_state_is_refused(cut: list[str]) -> None:
    """It would do the same in each forward."""
    with pytest.raises(CaptureError, match=r"it keeps state in first\.num_forwards"):
        capture(AsksAnother(), (X,), cut=cut)


def test_run_as_it_is_it_keeps_its_state() -> None:
    """Nothing is lost where its own code runs."""
    assert len(capture(nn.Sequential(nn.Linear(4, 4), Hidden()), (X,)).layers) == 2


class Notes(Base):
    """For others to read: the last output, how many there were, and of which size."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        self.sizes = x.shape
        self.last = self.linear(x)
        return self.last


class Memoizes(Base):
    """A constant that is made when it is first wanted."""

    ramp: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ramp is None:
            self.ramp = torch.arange(4.0)
        y: Tensor = self.linear(x) + self.ramp
        return torch.nn.functional.dropout(y, training=self.training)


class Statistics(Base):
    """Buffers may change: they are part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.count: Tensor
        self.mean: Tensor
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.norm(self.linear(x)) + self.mean
        self.mean = self.mean / 2 + self.last.detach().mean(0)
        return self.last * self.count.clone()


@pytest.mark.parametrize("make", [Notes, Memoizes, Statistics])
def test_what_is_not_read_again_is_captured(make: type[Base]) -> None:
    """Notes, constants and buffers; the model, and the data, are left as they were."""
    torch.manual_seed(0)
    model, x = make(), X.clone()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    notes, random = dict(vars(model)), torch.get_rng_state()

    captured = capture(model, (x,))

    assert captured.any_batch
    assert vars(model) == notes
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, X)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_without_data_nothing_is_run() -> None:
    """A forward on the meta device cannot show the state that one on data shows.

    Plans for machines that are not present capture models so.
    """
    with torch.device("meta"):
        model = Hidden()

    captured = capture(model, (X.to("meta"),))

    assert all(x.is_meta for x in captured.state.tensors.values())
    with pytest.raises(CaptureError, match="keeps state"):
        capture(Hidden(), (X,))
