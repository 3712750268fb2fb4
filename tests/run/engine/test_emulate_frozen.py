"""The oracle of layers that freeze while training runs, against a loop by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.program import Program
from hocket.errors import ConfigError
from tests.run.support.emulated_nets import ADAMW, batches


@pytest.mark.parametrize("delays", [(0, 0), (1, 0)])
def test_frozen_layers_have_no_gradient_and_no_update(delays: Sequence[int]) -> None:
    """From step 2 on the first layer stays; from step 4 on the second, too."""
    torch.manual_seed(8)
    data, model = batches(6), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = model.double()
    alone, states = copy.deepcopy(model), []
    program = Program.chain(range(2), 2, delays=delays)
    for num_steps in range(1, 7):
        trained = copy.deepcopy(model)
        hocket.emulate(
            program,
            trained,
            F.cross_entropy,
            ADAMW,
            data[:num_steps],
            {2: "1", 4: "2"},
            cut_at=["2"],
        )
        states.append(trained.state_dict())
    for name, first in (("0", 1), ("1", 3)):
        kept = [state[f"{name}.weight"] for state in states[first:]]
        assert all(torch.equal(x, kept[0]) for x in kept)
        assert not torch.equal(kept[0], states[first - 1][f"{name}.weight"])
    if delays != (0, 0):
        return
    optimizer = ADAMW(alone.parameters())
    for step, (x, y) in enumerate(data):
        alone[0].requires_grad_(step < 2)
        alone[1].requires_grad_(step < 4)
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(states[-1][name], value, rtol=1e-10, atol=1e-12)


class Blocks(nn.Module):
    """A stem, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to logits_BC."""
        return self.head(torch.tanh(self.blocks(torch.tanh(self.stem(x)))))


def emulated(freeze_at: Any) -> dict[str, Tensor]:
    """The weights after six steps."""
    torch.manual_seed(8)
    model = Blocks().double()
    program = Program.chain([0], 2)
    hocket.emulate(program, model, F.cross_entropy, ADAMW, batches(6), freeze_at)
    return model.state_dict()


def test_layers_freeze_by_number_as_by_name() -> None:
    """As a policy counts them: blocks, the first with the stem; at 0 all train."""
    found = emulated({1: 1, 2: 2, 3: 3, 5: 0})
    expected = emulated({1: "blocks.1", 2: "blocks.2", 3: "head", 5: "stem"})
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    both = emulated({"model": {1: "blocks.1", 2: 2, 3: "head", 5: 0}})
    assert all(torch.equal(both[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("freeze_at", "match"),
    [
        ({2: 1.0}, r"of net model is {2: 1.0}: give the number of frozen layers by st"),
        ({2: None}, r"first module that trains, as {200: 'blocks.4'}"),
        ({2: True}, "is {2: True}"),
        ({2: -1}, "is {2: -1}"),
        ({"2": 1}, "is {'2': 1}"),
        ([1, 2], r"is \[1, 2\]"),
        ("blocks.1", "is 'blocks.1'"),
        (
            {2: 4},
            "freezes 4 layers at step 2, and 3 can freeze: blocks.0, blocks.1, bl",
        ),
    ],
)
def test_what_freezes_must_be_a_number_or_a_module(freeze_at: Any, match: str) -> None:
    """The error shows the right form, or the layers that can freeze."""
    with pytest.raises(ConfigError, match=match):
        emulated(freeze_at)
