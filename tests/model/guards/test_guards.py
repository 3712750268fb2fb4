"""What a captured graph has fixed is compared, and each change is named."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hocket.model.guards.guards import Guards, ModelChange

SCALE = 2.0
RATES: Final = [0.1, 0.2]
UNRELATED = 0


class Settings:
    """An object that several modules share."""

    def __init__(self) -> None:
        self.rate = 0.5
        self.widths = [1, 2]


def scaled(x: Tensor) -> Tensor:
    """A function outside of the module, which reads a number outside of it."""
    return x * SCALE


class Block(nn.Module):
    """Reads all that it can."""

    factor = 3.0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.settings, self.scale = settings, 1.0
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(self.drop(self.linear(x))) * self.scale + self.table
        return self.helped(x) * RATES[0] * self.settings.rate

    def helped(self, x: Tensor) -> Tensor:
        """Part of the forward."""
        return x * self.factor

    def reported(self) -> int:
        """No part of the forward."""
        return UNRELATED


class Net(nn.Module):
    """Two blocks with common settings."""

    def __init__(self) -> None:
        super().__init__()
        settings = Settings()
        self.blocks = nn.ModuleList(Block(settings) for _ in range(2))
        self.alpha = 0.5

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.alpha


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    """ModelChange a number of this file."""
    return lambda net: globals().__setitem__(name, value)


def set_attribute(path: str, name: str, value: Any) -> Callable[[Any], None]:
    """ModelChange an attribute of a module, or of an object that it has."""

    def change(net: Any) -> None:
        found = net
        for part in filter(None, path.split(".")):
            found = getattr(found, part) if not part.isdigit() else found[int(part)]
        setattr(found, name, value)

    return change


BOTH: Final = frozenset({"blocks.0", "blocks.1"})


@pytest.mark.parametrize(
    ("change", "text", "owners"),
    [
        (set_attribute("", "alpha", 0.7), "alpha was 0.5 and is 0.7", {""}),
        (
            set_attribute("blocks.1", "scale", 2.0),
            "blocks.1.scale was 1.0 and is 2.0",
            {"blocks.1"},
        ),
        (
            set_attribute("blocks.0.drop", "p", 0.0),
            "blocks.0.drop.p was 0.1 and is 0.0",
            {"blocks.0.drop"},
        ),
        (
            set_attribute("blocks.0.settings", "rate", 0.6),
            "settings.rate was 0.5 and is 0.6",
            BOTH,
        ),
        (
            lambda net: net.blocks[1].settings.widths.append(3),
            "settings.widths[...] was [1, 2] and is [1, 2, 3]",
            BOTH,
        ),
        (set_global("SCALE", 3.0), "the global SCALE was 2.0 and is 3.0", BOTH),
        (
            lambda net: setattr(Block, "factor", 4.0),
            "Block.factor was 3.0 and is 4.0",
            BOTH,
        ),
        (
            lambda net: net.blocks[0].linear.eval(),
            "blocks.0.linear.training was True and is False",
            {"blocks.0.linear"},
        ),
        (
            lambda net: net.blocks[0].linear.register_forward_hook(scaled),
            "blocks.0.linear._forward_hooks was empty and is scaled",
            {"blocks.0.linear"},
        ),
        (
            set_attribute("blocks.1", "drop", nn.Identity()),
            "blocks.1.drop was Dropout and is Identity",
            {"blocks.1"},
        ),
        (
            set_attribute("blocks.1", "drop", nn.Dropout(0.1)),
            "blocks.1.drop was Dropout and is another Dropout",
            {"blocks.1"},
        ),
        (
            lambda net: net.blocks[0].table.add_(1),
            "blocks.0.table (in place) was a Tensor and is a Tensor",
            {"blocks.0"},
        ),
        (
            set_attribute("blocks.0", "table", torch.zeros(4)),
            "blocks.0.table was a Tensor and is a Tensor",
            {"blocks.0"},
        ),
        (
            set_attribute("blocks.0", "late", 1),
            "blocks.0.late was not set and is 1",
            {"blocks.0"},
        ),
    ],
)
def test_names_what_has_changed_and_who_reads_it(
    change: Callable[[Any], None],
    text: str,
    owners: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once; the next comparison is with what is there then."""
    monkeypatch.setitem(globals(), "SCALE", SCALE)
    monkeypatch.setattr(Block, "factor", Block.factor)
    net = Net()
    guards = Guards(net)
    assert guards.changes() == []
    change(net)
    (found,) = guards.changes()
    assert str(found) == text
    assert found.owners == frozenset(owners)
    assert guards.changes() == []


def test_what_forwards_have_changed_is_forgotten() -> None:
    """What they cannot change by themselves is still seen by the next comparison."""
    net = Net()
    guards = Guards(net)
    net.alpha = 0.7
    guards.forget()
    assert guards.changes() == []
    net.get_submodule("blocks.0.linear").bias.requires_grad = False
    guards.forget()
    assert [x.kind for x in guards.changes()] == ["trained"]


def test_a_list_outside_is_compared_by_its_content() -> None:
    """The list itself stays; what is in it changes."""
    net = Net()
    guards = Guards(net)
    RATES[0] = 0.3
    try:
        assert {x.owners for x in guards.changes()} == {BOTH}
    finally:
        RATES[0] = 0.1


def test_what_no_forward_reads_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop counts and logs beside the model."""
    net = Net()
    guards = Guards(net)
    monkeypatch.setitem(globals(), "UNRELATED", 1)
    net(torch.ones(1, 4))
    assert guards.changes() == []


def test_a_parameter_that_is_frozen_is_a_change() -> None:
    """Once; and once more, where it is trained again."""
    layer = nn.Linear(4, 4)
    guards = Guards(layer)
    for trained in (False, True):
        layer.bias.requires_grad = trained
        (change,) = guards.changes()
        assert (
            str(change) == f"requires_grad of bias was {not trained} and is {trained}"
        )
        assert change.kind == "trained"
        assert guards.changes() == []


def test_a_model_that_is_gone_has_no_changes() -> None:
    """Nothing of it is kept alive: its weights are freed."""
    net = Net()
    guards = Guards(net)
    net.alpha = 0.9
    del net
    gc.collect()
    assert guards.changes() == []


def test_parameters_that_are_moved_or_removed_are_changes() -> None:
    """No hook of torch's is called then."""
    net = Net()
    guards = Guards(net)
    linear = net.get_submodule("blocks.0.linear")
    linear.half()
    changes = guards.changes()
    assert {str(x) for x in changes} == {
        f"blocks.0.linear.{name} was torch.float32 and is torch.float16"
        for name in ("weight", "bias")
    }
    assert {x.kind for x in changes} == {"type"}
    linear.register_parameter("bias", None)
    assert [str(x) for x in guards.changes()] == [
        "blocks.0.linear.bias was Parameter and is NoneType"
    ]
    assert guards.changes() == []


def test_modules_and_buffers_that_leave_or_change_places_are_changes() -> None:
    """No hook of torch's is called then, and who keeps them keeps them alive."""
    net = nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()})
    norm = nn.BatchNorm1d(2)
    net["norm"] = norm
    guards = Guards(net)
    first = net.pop("a")
    (change,) = guards.changes()
    assert str(change) == "a was Tanh and is not set"
    net["a"] = first
    assert [str(x) for x in guards.changes()] == ["a was not set and is Tanh"]
    net["b"] = net.pop("b")
    (change,) = guards.changes()
    assert str(change) == "_modules was in one order and is in another"
    assert change.owners == frozenset({""})
    del norm.running_mean
    assert [x.kind for x in guards.changes()] == ["buffer"]
    assert guards.changes() == []


def test_a_tensor_in_place_of_a_number_is_a_change() -> None:
    """Two tensors have no one answer to whether they are equal."""
    net = Net()
    guards = Guards(net)
    vars(net)["alpha"] = torch.ones(2)
    assert [x.name for x in guards.changes()] == ["alpha"]
    vars(net)["alpha"] = torch.ones(2)
    assert guards.changes() == [
        ModelChange("alpha", "a Tensor", "a Tensor", frozenset({""}))
    ]


@pytest.mark.parametrize(
    ("was", "now"), [(1, True), (1.0, 1), (0.0, -0.0), ([1], [True])]
)
def test_equal_values_of_another_type_or_sign_are_changes(was: Any, now: Any) -> None:
    """Past bug: Python takes them for equal, and code does not."""
    net = Net()
    vars(net)["alpha"] = was
    guards = Guards(net)
    vars(net)["alpha"] = copy.deepcopy(was)
    assert not guards.changes()
    vars(net)["alpha"] = now
    assert [x.name for x in guards.changes()] == ["alpha"]
    assert not guards.changes()
