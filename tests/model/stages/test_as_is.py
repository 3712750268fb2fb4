"""Modules that run as they are give the numbers of their captured calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import check_as_is, cut

ARGS: Final = (torch.arange(15).view(3, 5) % 10, torch.ones(3, 5))


class Scaled(nn.Module):
    """Takes a structure of arguments, returns one, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(
        self, x: Tensor, given: dict[str, Tensor], scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        x = self.linear(x) * given["mask"] * scale
        return self.drop(x), x


class Net(nn.Module):
    """A module that is called twice, tied weights, draws of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.a, self.b = nn.Embedding(10, 8), Scaled(), Scaled()
        self.norm, self.same = nn.BatchNorm1d(5), nn.Identity()
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.rows.weight

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        given = {"mask": mask.unsqueeze(-1)}
        h = self.rows(x)
        h, _ = self.a(h, given, scale=2.0)
        h, y = self.a(h + 1, given, scale=2.0)
        h = self.same(self.norm(h + y))
        h, _ = self.b(h, given)
        return self.out(F.dropout(h, 0.3, self.training))


@pytest.fixture
def captured() -> Captured:
    """The net, captured in float32."""
    torch.manual_seed(0)
    return capture(Net(), ARGS)


def seed(layer: int) -> None:
    """Seed the generator that a layer draws from."""
    torch.manual_seed(layer)


def outputs(
    captured: Captured, as_is: Iterable[str], boundaries: tuple[int, ...]
) -> tuple[Tensor, list[str]]:
    """What stages compute under fixed seeds, and the modules that run as they are."""
    captured.as_is.clear()
    captured.as_is.update(dict.fromkeys(as_is, "a test"))
    values: Any = ()
    called = []
    for stage in cut(captured, boundaries):
        stage.layer_seeds.seed = seed
        leaves = captured.example.leaves
        values = stage(*values, *(leaves[i] for i in stage.batch_inputs))
        nodes = stage.training_code.graph.find_nodes(op="call_module")
        called += [str(node.target) for node in nodes]
    return values, called


WAYS: Final = [
    (("a",), ["module_a", "module_a_1"]),
    (("a.drop", "norm"), ["module_a_drop", "module_a_drop_1", "module_norm"]),
    (("b", "b.drop"), ["module_b"]),
    (("same",), []),
]


@pytest.mark.parametrize("boundaries", [(), (3,)])
@pytest.mark.parametrize(("as_is", "called"), WAYS)
def test_computes_and_draws_the_same(
    captured: Captured,
    as_is: tuple[str, ...],
    called: list[str],
    boundaries: tuple[int, ...],
) -> None:
    """Dropout masks depend on neither the cut nor on what runs as it is."""
    expected, nothing = outputs(captured, (), ())
    found, modules = outputs(captured, as_is, boundaries)
    assert not nothing
    assert set(called) <= set(modules)
    assert torch.equal(found, expected)


def test_the_whole_model_runs_as_it_is_in_one_stage(captured: Captured) -> None:
    """Its own code draws, too, after a module that it has called."""
    expected, _ = outputs(captured, (), ())
    found, modules = outputs(captured, ("",), ())
    assert modules == ["module_"]
    assert torch.equal(found, expected)


def test_a_module_cut_apart_is_named(captured: Captured) -> None:
    """No stage has all of the model's own forward."""
    captured.as_is["a"] = "a test"
    check_as_is(captured, (3,))
    captured.as_is[""] = "a test"
    with pytest.raises(ModelError, match=r"own forward is cut apart .*: a test\."):
        check_as_is(captured, (3,))


def test_state_keeps_its_names(captured: Captured) -> None:
    """Weights of a module that runs as it is are the stage's, under their names."""
    captured.as_is.update({"": "a test", "a": "a test"})
    (stage,) = cut(captured, ())
    assert stage.state_dict().keys() == captured.model.state_dict().keys()
    named = dict(captured.model.named_parameters())
    assert all(x is named[name] for name, x in stage.named_parameters())
