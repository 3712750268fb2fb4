"""The oracle of layers that freeze while training runs, against a loop by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.core.program import Program
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
            correction="error-feedback",
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
