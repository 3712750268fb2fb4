"""What a loop changes between two steps is followed by captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.run.outoforder.captured_orders import EagerStepWarning
from tests.run.outoforder.support.plain_loop import (
    Between,
    batches,
    compiled,
    equal,
    net,
    piped,
    plainly,
    sgd,
)

ALPHA = 1.0
CHANGED, AT = [True, True, False, True, True], 2


def at_step_two(change: Any) -> Between:
    """Change something once."""
    return lambda step, model, optimizer: change(model, optimizer) if step == AT else 0


def hook(module: nn.Module) -> None:
    """Double the output."""
    module.register_forward_hook(lambda module, args, output: 2 * output)


def reset(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let one weight lose its momentum."""
    optimizer.state.pop(model[4].weight)


def regroup(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give the last bias a rate of its own."""
    bias = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [bias], "lr": 0.5})


@pytest.mark.parametrize(
    ("change", "captured"),
    [
        (lambda m, _: setattr(m[2], "p", 0.6), CHANGED),
        (lambda m, _: setattr(m, "3", nn.ReLU()), CHANGED),
        (lambda m, _: setattr(m[0].weight, "data", 2 * m[0].weight.data), CHANGED),
        (lambda m, _: setattr(m[1], "running_mean", torch.ones(8).double()), CHANGED),
        (lambda m, _: m[1].eval(), [True] * 5),
        (lambda m, _: m[0].requires_grad_(requires_grad=False), [True] * 5),
        (lambda _, o: o.param_groups[0].update(weight_decay=0.1), [True] * 5),
        (lambda _, o: o.param_groups[0].update(lr=0.01), [True] * 5),
        (regroup, [True] * 5),
        (reset, [True] * 5),
    ],
    ids=[
        *("rate", "submodule", "data", "buffer", "eval", "frozen", "decay", "lr"),
        *("group", "state"),
    ],
)
def test_a_change_is_followed(change: Any, captured: list[bool]) -> None:
    """The step in which a value changes runs as it is; then there is a new graph."""
    data, between = batches(), at_step_two(change)
    expected, model = plainly(net(), sgd, data, between), net()
    assert compiled(model, sgd, data, between) == captured
    assert equal(model, expected)


@pytest.mark.parametrize("run", [compiled, piped])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m, _: hook(m[0]), "Linear has hooks"),
        (lambda m, _: m[0].weight.register_hook(lambda g: 2 * g), "a hook on its grad"),
        (
            lambda m, _: setattr(m[4], "weight", nn.Parameter(2 * m[4].weight.data)),
            "the optimizer has it not",
        ),
    ],
)
def test_from_a_hook_on_steps_run_as_they_are(run: Any, change: Any, why: str) -> None:
    """So do they with a weight that the optimizer does not know."""
    data, between = batches(), at_step_two(change)
    expected, model = plainly(net(), sgd, data, between), net()
    with pytest.warns(EagerStepWarning, match=why):
        run(model, sgd, data, between)
    assert equal(model, expected)


class Tempered(nn.Module):
    """A temperature in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.temperature = net(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Divide by it."""
        y: Tensor = self.layers(x) / self.temperature
        return y


@pytest.mark.parametrize("run", [compiled, piped])
def test_an_attribute_that_changes_at_every_step(run: Any) -> None:
    """No graph is captured for it; weights were 31 % off."""

    def anneal(step: int, model: Any, _: Any) -> None:
        model.temperature = 1 + step / 2

    data = batches()
    expected, model = plainly(Tempered(), sgd, data, anneal), Tempered()
    with pytest.warns(EagerStepWarning, match="temperature was 1.5 and is 2.0"):
        played = run(model, sgd, data, anneal)
    assert played in (None, [True, False, False, False, False])
    assert equal(model, expected)


def weighed(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that reads a number of this module."""
    return ALPHA * F.cross_entropy(output, targets)


def test_a_number_that_the_loss_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is outside of all modules."""

    def change(step: int, *_: Any) -> None:
        monkeypatch.setattr(f"{__name__}.ALPHA", 1.0 if step < AT else 2.0)

    data = batches()
    expected, model = plainly(net(), sgd, data, change, weighed), net()
    change(0)
    assert compiled(model, sgd, data, change, weighed) == CHANGED
    assert equal(model, expected)
