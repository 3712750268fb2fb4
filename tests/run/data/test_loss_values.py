"""Losses become numbers, at once or all together, and none may be no number."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import NonFiniteError
from hocket.run.stage.stage_loss import LossValues
from tests.run.support.delayed_copies import DelayedCopies
from tests.run.support.plainly import SGD
from tests.run.support.started import started


def named(total: float, accuracy: float = 0.5) -> dict[str, Tensor]:
    """Two losses of different types, one of them with a graph behind it."""
    weight = torch.tensor(total, requires_grad=True)
    return {"loss": weight * 1.0, "accuracy": torch.tensor(accuracy).double()}


def loss_values(stage: int, *, at_once: bool) -> LossValues:
    """A CPU's, or those of a device whose copies take a while."""
    return LossValues(stage, None if at_once else DelayedCopies(0.02))


@pytest.mark.parametrize("at_once", [True, False])
def test_values_are_those_of_the_tensors(at_once: bool) -> None:
    """Exactly, by microbatch, in the order in which they were named."""
    losses = loss_values(1, at_once=at_once)
    for index, total in ((0, 0.1), (2, 3.0), (1, 1e-30)):
        losses.take(4, index, named(total, total / 3))
    found = losses.read()

    assert list(found) == [0, 2, 1]
    for index, total in ((0, 0.1), (2, 3.0), (1, 1e-30)):
        tensors = named(total, total / 3)
        assert found[index] == {name: value.item() for name, value in tensors.items()}
        assert list(found[index]) == ["loss", "accuracy"]
    assert losses.read() == {}


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_read_later_is_what_there_was(at_once: bool) -> None:
    """Later changes of the tensor in place do not change the loss."""
    losses = loss_values(1, at_once=at_once)
    total = torch.ones(())
    losses.take(0, 0, {"loss": total})
    total.fill_(math.nan)
    assert losses.read() == {0: {"loss": 1.0}}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_loss_that_is_no_number_is_named(value: float, at_once: bool) -> None:
    """With the same words, whether it is read at once or with the others."""
    losses = loss_values(3, at_once=at_once)
    losses.take(7, 0, named(1.0))
    where = rf"^the loss is {value} at step 7, stage 3, microbatch 2; no weights"
    with pytest.raises(NonFiniteError, match=where):
        _take_two_and_read(losses, value)


def _take_two_and_read(losses: LossValues, value: float) -> None:
    for index in (2, 5):
        losses.take(7, index, named(value))
    losses.read()


def test_only_what_is_trained_must_be_finite() -> None:
    """A metric beside it may be anything."""
    losses = loss_values(0, at_once=True)
    losses.take(0, 0, named(1.0, math.inf))
    assert losses.read() == {0: {"loss": 1.0, "accuracy": math.inf}}


def test_nothing_is_read_before_it_is_asked_for() -> None:
    """Where reading would wait for the device, a step goes on with a bad loss."""
    losses = loss_values(0, at_once=False)
    losses.take(0, 0, named(math.nan))
    losses.clear()
    assert losses.read() == {}


def trained(num_bad: int, *, at_once: bool) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of a small pipeline, whose third batch has bad numbers.

    An accelerator's way of reading losses is tried where there is none.
    """
    torch.manual_seed(1)
    batches = [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(3)]
    batches[2][1][8 - num_bad :] = math.nan
    with started(
        nn.Linear(3, 2), F.mse_loss, SGD, batches[0], num_microbatches=4
    ) as pipeline:
        (runner,) = pipeline._executor.runners.values()
        runner.loss.values = loss_values(0, at_once=at_once)
        losses = [pipeline.step(batch).loss for batch in batches[:2]]
        weights = [p.detach().clone() for p in runner.parameters.values()]
        if num_bad:
            bad = r"^the loss is nan at step 2, stage 0, microbatch 2; no weights were"
            with pytest.raises(NonFiniteError, match=bad):
                pipeline.step(batches[2])
            for before, now in zip(weights, runner.parameters.values(), strict=True):
                assert torch.equal(before, now)
    return losses, weights


@pytest.mark.parametrize("num_bad", [0, 3])
def test_training_is_the_same_whenever_losses_are_read(num_bad: int) -> None:
    """To the last bit; and the first bad microbatch stops it before any update."""
    (losses, weights), (later, others) = (
        trained(num_bad, at_once=at_once) for at_once in (True, False)
    )
    assert later == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
