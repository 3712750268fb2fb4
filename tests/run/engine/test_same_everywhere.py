"""Losses are compared by their values, wherever these are the same in each call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.run.engine.same_everywhere import losses_of_random_outputs

CPU: Final = torch.device("cpu")
CLASSES: Final = torch.tensor([0, 1, 2, 1])


class Outputs(nn.Module):
    """Returns what it has computed, an input, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"classes": self.linear(x), "more": [x, 3]}


def probed(loss: Callable[..., Any], targets: Tensor = CLASSES) -> dict[str, float]:
    """The losses of this model's outputs."""
    captured = capture(Outputs(), (torch.ones(4, 6),))
    before = torch.get_rng_state()
    found = losses_of_random_outputs(loss, captured, targets, (), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    return found


def smoothed(share: float) -> Callable[[Any, Tensor], Tensor]:
    """Cross entropy with smoothed labels."""
    return lambda output, targets: F.cross_entropy(
        output["classes"], targets, label_smoothing=share
    )


def test_a_small_difference_of_an_argument_shows() -> None:
    """And two models of one structure have the same, whatever their weights."""
    one, same, other = (probed(smoothed(share)) for share in (0.1, 0.1, 0.1001))
    assert one == same
    assert one["loss"] != pytest.approx(other["loss"], rel=1e-6)


def test_a_loss_gets_all_that_the_model_returns() -> None:
    """In its own types and structure."""

    def loss(output: Any, targets: Tensor) -> dict[str, Tensor]:
        x, three = output["more"]
        weights = torch.ones(3)
        value = F.cross_entropy(output["classes"], targets, weight=weights)
        return {"loss": value, "aux": x.sum() + three}

    assert probed(loss)["aux"] == 4 * 6 + 3


def test_random_numbers_of_torch_are_seeded_and_others_are_not_compared() -> None:
    """And the user's generator is as before."""

    def dropped(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(output["classes"]), targets)

    def drawn(output: Any, targets: Tensor) -> Tensor:
        return output["classes"].mean() * random.random()

    assert probed(dropped) == probed(dropped) != {}
    assert probed(drawn) == {}


def test_a_loss_that_cannot_be_tried_is_the_same_where_it_fails_alike() -> None:
    """As one that wants outputs of another range."""
    assert probed(lambda output, targets: output["no such"]) == {"KeyError": 0.0}
