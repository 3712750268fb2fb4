"""Steps that run as they are, since nothing can compile them; and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import CaptureError, ConfigError, RunError
from hocket.run.outoforder.captured_orders import EagerStepWarning
from tests.run.outoforder.support.small_steps import (
    OPTIMIZERS,
    SPECIMENS,
    TOLERANCE,
    batches_of,
    difference,
    loss,
    model_of,
    train_compiled,
    train_eagerly,
)

SPECIMEN = SPECIMENS["convolutional"]


def test_a_batch_of_objects_runs_as_it_is() -> None:
    """Their tensors would be constants of the graph; one warning for all batches."""

    class Point:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, point: Point) -> Tensor:
            return self.layer(point.x)

    targets, make = torch.zeros(4, dtype=torch.long), OPTIMIZERS["SGD"]
    batches = [(Point(torch.randn(4, 2)), targets) for _ in range(3)]
    model, own = Reader(), copy.deepcopy(Reader())
    own.load_state_dict(model.state_dict())
    with pytest.warns(EagerStepWarning, match="holds a Point"):
        step = hocket.compile_step(model, loss, make, example=batches[0])
    with step:
        losses = [step(batch).loss for batch in batches]
    expected, _ = train_eagerly(own, make, batches)
    assert losses == pytest.approx(expected, rel=1e-6)


class DataDependent(nn.Module):
    """Takes a branch that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Compute one thing or another."""
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


class Counting(nn.Linear):
    """Changes an attribute in forward."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count the calls."""
        self.count += 1
        return super().forward(x) * self.count


class ChangesWeights(nn.Linear):
    """Changes its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the weight in place."""
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return super().forward(x)


class Reads(torch.optim.SGD):
    """An optimizer whose step reads values of tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Skip small gradients."""
        if sum(p.grad.norm().item() for p in self.param_groups[0]["params"]) > 0:
            super().step()


@pytest.mark.parametrize(
    ("model", "make", "why"),
    [
        (DataDependent(), OPTIMIZERS["SGD"], "depend on the values"),
        (Counting(8, 4), OPTIMIZERS["SGD"], "changes its own attribute 'count'"),
        (nn.Linear(8, 4), lambda p: Reads(p, 0.1), "Reads cannot be captured"),
    ],
)
def test_runs_as_it_is_what_cannot_be_captured(
    model: nn.Module, make: Any, why: str
) -> None:
    """With a warning that says why; it trains the same."""
    batches, model = batches_of(SPECIMENS["perceptron"], 5), model.double()
    expected, _ = train_eagerly(model, make, batches)
    with pytest.warns(EagerStepWarning, match=why):
        step = hocket.compile_step(model, loss, make, example=batches[0])
    with step:
        assert train_compiled(step, batches) == expected
        with pytest.raises(RunError, match="could not be captured"):
            print(step.predicted)


def test_refuses_a_model_that_changes_its_weights() -> None:
    """It would train something else than the optimizer thinks, compiled or not."""
    example = batches_of(SPECIMENS["perceptron"], 1)[0]
    model = ChangesWeights(8, 4).double()
    with pytest.raises(CaptureError, match=r"changes its weight 'model\.weight'"):
        hocket.compile_step(model, loss, OPTIMIZERS["SGD"], example=example)


def test_refuses_an_optimizer_in_the_place_of_a_function() -> None:
    """The factory is Pipeline's."""
    model, example = model_of(SPECIMEN), batches_of(SPECIMEN, 1)[0]
    optimizer: Any = OPTIMIZERS["SGD"](model.parameters())
    with pytest.raises(ConfigError, match="a function that makes a torch optimizer"):
        hocket.compile_step(model, loss, optimizer, example=example)


def test_settings_that_change_with_every_step_do_not_compile_for_ever() -> None:
    """A cyclic momentum: some graphs, then steps as they are, to the same weights."""
    batches = batches_of(SPECIMENS["perceptron"], 7)
    model, ours = model_of(SPECIMENS["perceptron"]), model_of(SPECIMENS["perceptron"])

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def cyclic(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    optimizer = make(model.parameters())
    scheduler = cyclic(optimizer)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    with hocket.compile_step(ours, loss, make, example=batches[0]) as step:
        scheduler = cyclic(step.optimizer)

        def train() -> None:
            for batch in batches:
                step(batch)
                scheduler.step()

        with pytest.warns(EagerStepWarning, match="cycle_momentum=False"):
            train()
    assert difference(ours, model) <= TOLERANCE
