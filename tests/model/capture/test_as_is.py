"""A module that cannot be captured runs as it is, between cuts around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import CaptureError, ModelError
from hocket.model.capture.capture import Captured, capture
from hocket.model.capture.captured import with_more_layers
from hocket.model.stages.cut import boundaries_from_names, cut
from tests.model.support.custom_backward import Doubled
from tests.model.support.small_models import captured_case
from tests.model.support.stages_by_hand import Case, forward, worst_difference
from tests.zoo.odd import Branching

X = torch.randn(4, 6, dtype=torch.float64)


def modules_as_is(captured: Captured) -> list[str]:
    """The paths of the modules that run as they are, in training."""
    trace = captured.training.trace
    return [trace.path_of(x) for x in trace.calls if x.op == "call_module"]


class Positive(nn.Module):
    """Returns as many rows as the data say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.nonzero(x[:, 0] > 0).squeeze(-1)]


class MeanOfPositive(nn.Module):
    """What is inside has no known shape; what it returns has one."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = Positive()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.positive(x)
        mean = rows.mean(0) if len(rows) else x.mean(0)
        return x + mean * self.scale


class Two(nn.Module):
    """A layer before and after something."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = middle
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.middle(self.first(x))) + x)
        return y


class Selects(Two):
    """Its own code makes a tensor whose shape depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        rows = self.middle(y[y[:, 0] > 0]).sum(0)
        z: Tensor = self.last(y + rows)
        return z


class Decides(Two):
    """Its own code looks at the data."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum().item() > 0:
            y = self.middle(y)
        z: Tensor = self.last(y)
        return z


class Doubles(nn.Module):
    """Uses it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
        return y


class Counts(Two):
    """Calls a submodule as often as there are samples."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(x.shape[0]):
            y = self.last(y)
        return y


def test_the_experts_of_a_mixture_are_found() -> None:
    """A ten-line mixture of experts; no name has to be given."""
    captured = captured_case("experts")[1]

    assert modules_as_is(captured) == ["experts.0", "experts.1", "experts.2"]
    assert captured.any_batch
    names = ("experts.1", "experts.2", "head")
    more = with_more_layers(captured, names)
    assert len(boundaries_from_names(more, names)) == 3


def test_what_cannot_be_cut_inside_says_so() -> None:
    """A module that runs as it is, is one layer."""
    captured = captured_case("experts")[1]

    with pytest.raises(ModelError, match=r"inside experts\.1, which runs as it is"):
        boundaries_from_names(captured, ["experts.1.gate"])


def test_the_module_around_runs_as_it_is_if_the_boundary_is_unknown() -> None:
    """As many rows as the data say cannot cross a cut; their mean can."""
    case = Case(Two(MeanOfPositive()).double(), (X,))
    captured = case.capture()

    assert modules_as_is(captured) == ["middle"]
    assert worst_difference(case, captured, 2) <= 1e-14


def test_a_custom_backward_runs_as_it_is() -> None:
    """A graph would lose it."""
    case = Case(Two(Doubles()).double(), (X,))
    captured = case.capture()

    assert modules_as_is(captured) == ["middle"]
    assert worst_difference(case, captured, 2) <= 1e-14


def test_no_cut_where_a_shape_depends_on_the_data() -> None:
    """The model is captured, and cut before and behind what has no known shape."""
    case = Case(Selects(nn.Linear(6, 6)).double(), (X,))
    captured = case.capture()

    assert modules_as_is(captured) == []
    received = [value for layer in captured.layers for value in layer.received]
    assert {value.shape for value in received} == {(4, 6)}
    assert worst_difference(case, captured, 2) <= 1e-14


def test_submodules_that_only_branch_are_found() -> None:
    """What had to be named in `cut`."""
    captured = capture(Branching(), (torch.randn(4, 6), torch.rand(4)))

    assert modules_as_is(captured) == ["blocks.0", "blocks.1", "blocks.2"]
    names = ["blocks.0", "blocks.1", "blocks.2", "end"]
    more = with_more_layers(captured, names)
    assert len(boundaries_from_names(more, names)) == 4


def test_refused_without_any_boundary() -> None:
    """The advice needs no change of the library that the model comes from."""
    with pytest.raises(CaptureError) as error:
        capture(Decides(nn.Identity()).double(), (X,))

    assert "if y.sum().item() > 0" in str(error.value)
    assert "experts_implementation" in str(error.value)
    assert "wrap" in str(error.value)


def test_a_number_of_calls_that_depends_on_the_batch_is_seen() -> None:
    """torch.export fixes the number of samples without a word; it ran 13 calls."""
    model = Counts(nn.Identity()).double()
    captured = capture(model, (X,))
    (stage,) = cut(captured, ())

    assert not captured.any_batch
    _, outputs = forward([stage], [X])
    assert torch.equal(outputs[-1], model(X))
