"""Models that cannot be captured run in submodules, if their own code only hands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import CaptureError
from hocket.model.capture.capture import Captured, capture
from hocket.model.stages.cut import boundaries_from_names, cut
from hocket.model.trace.per_sample import PerSample
from tests.model.support.stages_by_hand import Case, worst_difference
from tests.zoo.odd import Branching

X = torch.randn(4, 6)
GATE = torch.rand(4)
ALL = ("blocks.0", "blocks.1", "blocks.2", "end")


class Sign(nn.Module):
    """Looks at the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


class Base(nn.Module):
    """Two layers around something that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.sign = Sign()
        self.last = nn.Linear(6, 6)


class Adds(Base):
    """Computes between its submodules."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.sign(self.first(x)) + x)
        return y


class Decides(Base):
    """Goes a way that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if bool(y.gt(0).any()):
            y = self.sign(y)
        z: Tensor = self.last(y)
        return z


class Switches(Base):
    """Runs a submodule without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x)
        z: Tensor = self.last(self.sign(y))
        return z


class Stacks(nn.Module):
    """Makes a batch of a list."""

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack(list(images))


class Counts(Base):
    """Calls a submodule as often as there are samples."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.sign(self.first(x))
        for _ in range(x.shape[0]):
            y = self.last(y)
        return y


class Remembers(nn.Module):
    """Takes notes on itself, and assigns its buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        y: Tensor = self.linear(x) + self.mean
        return y if x.sum().item() > 0 else -y


class Notes(nn.Module):
    """A chain of two of those."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Remembers()
        self.b = Remembers()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def captured_branching() -> Captured:
    """In float64, all places named."""
    model = Branching().double()
    args = (X.double(), GATE.double())
    return capture(model, args, cut=ALL, capture="submodules")


def test_every_submodule_can_begin_a_stage() -> None:
    """Those inside a ModuleList, too; a skip and a dict cross as single tensors."""
    captured = captured_branching()

    assert [layer.name for layer in captured.layers] == ["begin", *ALL]
    assert boundaries_from_names(captured, ALL) == (1, 2, 3, 4)
    assert [len(layer.received) for layer in captured.layers] == [0, 1, 3, 4, 5]
    assert captured.any_batch


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_are_the_uncut_model(num_stages: int) -> None:
    """Outputs, gradients and buffers, for other numbers of samples too."""
    captured = captured_branching()
    case = Case(captured.model, (X.double(), GATE.double()))

    assert worst_difference(case, captured, num_stages) <= 1e-14


@pytest.mark.parametrize(
    ("model", "what", "line"),
    [
        (Adds, "torch.Tensor.add", "self.last(self.sign(self.first(x)) + x)"),
        (Decides, "torch.Tensor.gt", "if bool(y.gt(0).any())"),
        (Switches, "set_grad_enabled", "with torch.no_grad():"),
    ],
)
def test_code_between_submodules_must_not_compute(
    model: type[nn.Module], what: str, line: str
) -> None:
    """It would be lost, for stages run nothing but the submodules."""
    with pytest.raises(CaptureError) as error:
        capture(model(), (X,), cut=["last"], capture="submodules")

    assert what in str(error.value)
    assert line in str(error.value)


def test_no_place_inside_a_submodule_that_computes() -> None:
    """The error names it, and why it stays whole."""
    model = nn.ModuleDict({"inner": Adds()})
    model.forward = lambda x: model["inner"](x)

    with pytest.raises(CaptureError, match=r"before inner\.last, .* of inner: its"):
        capture(model, (X,), cut=["inner.last"], capture="submodules")


def test_another_number_of_samples_must_lead_to_the_same_calls() -> None:
    """Otherwise the model runs with the example's number only, and says so."""
    captured = capture(Counts(), (X,), cut=["sign"], capture="submodules")

    assert not captured.any_batch
    assert "other calls" in captured.fixed_batch


class Skips(Base):
    """Leaves out a module for one number of samples."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = self.last(y if len(x) == self.number else self.sign(y))
        return out


class Doubles(Skips):
    """Changes a tensor in place for one number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[0] == self.number:
            y.mul_(2)
        out: Tensor = self.last(y)
        return out


@pytest.mark.parametrize("kind", [Skips, Doubles])
@pytest.mark.parametrize("number", [0, 1, 3, 5, 6, 9])
def test_numbers_of_samples_are_tried(kind: type[Skips], number: int) -> None:
    """Where one leads to something else, it is refused; and what was not tried, too."""
    model = kind()
    model.number = number
    captured = capture(model, (X,), capture="submodules")
    assert captured.any_batch == (number != 5)
    for sizes in captured.right_for.values():
        refused = {n for n in range(1, 9) if sizes.fault_of_samples(n)}
        others = {number, 6, 7, 8} if number != 5 else {*range(1, 9)} - {4}
        assert refused == others & {*range(1, 9)}


class Stacked(Base):
    """Makes a batch of a list, and counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stacks()

    def forward(self, images: list[Tensor]) -> Tensor:
        y: Tensor = self.last(self.first(self.stack(images)))
        return y


class Many(Stacked):
    """Counts a list of images, when it evaluates."""

    def forward(self, images: list[Tensor]) -> Tensor:
        y: Tensor = self.first(self.stack(images))
        if self.training or len(images) < 5:
            y = self.last(y)
        return y


def test_numbers_are_tried_in_evaluation() -> None:
    """Also where no size of a tensor is asked for."""
    images = PerSample(torch.randn(4, 6))
    captured = capture(Many(), (images,), capture="submodules")
    training, evaluation = (captured.right_for[x] for x in (True, False))
    assert not training.fault_of_samples(9)
    refused = {n for n in range(1, 9) if evaluation.fault_of_samples(n)}
    assert refused == {5, 6, 7, 8}
    assert "with 1, 2, 3, 4 alone, and" in evaluation.fault_of_samples(5)


class Few(Many):
    """Counts a list of images in both modes, for a number below the example's."""

    def forward(self, images: list[Tensor]) -> Tensor:
        y: Tensor = self.first(self.stack(images))
        return y if len(images) == 3 else self.last(y)


@pytest.mark.parametrize("kind", [Few, Stacked])
def test_lengths_of_lists_are_tried_up_to_the_examples(kind: type[nn.Module]) -> None:
    """No size of a tensor is asked for there; where nothing follows, all may come."""
    images = PerSample(torch.randn(4, 6))
    captured = capture(kind(), (images,), capture="submodules")
    for sizes in captured.right_for.values():
        refused = {n for n in range(1, 9) if sizes.fault_of_samples(n)}
        assert refused == ({3, 6, 7, 8} if kind is Few else set())


class Asks(Base):
    """Asks for sizes that do not follow the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.sign(self.first(x))
        if x.size(1) == 6 and x.dim() == 2:
            y = self.last(y)
        return y


def test_other_sizes_do_not_fix_the_number() -> None:
    """What it was not run with is right as well."""
    captured = capture(Asks(), (X,), capture="submodules")
    assert all(not x.fault_of_samples(99) for x in captured.right_for.values())


def test_the_model_is_left_as_it_was() -> None:
    """Though it ran: its notes, its buffers, random numbers."""
    model = Notes()
    before: dict[str, Any] = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()

    captured = capture(model, (X,), cut=["b"], capture="submodules")

    assert all(torch.equal(x, before[k]) for k, x in model.state_dict().items())
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert model.a.calls == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert cut(captured, (1,))[0](X)[0].shape == (4, 6)
