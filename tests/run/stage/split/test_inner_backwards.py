"""A forward that runs a backward of its own: weight gradients wait, or it runs twice.

The hooks that put off a weight's gradient once took the inner backward for that of the
step: with zb-h1, forces trained to weights that had nothing to do with the plain
loop's, without a word. And its graph is computed from weights, which a deferred layer
had detached.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.conformance.cases.inner_backwards import Energy, Forces, Slope, Transformed
from tests.conformance.script import batches, chain, mse, sgd
from tests.in_turns import in_turns
from tests.run.support.plainly import train_plainly
from tests.run.support.started import started

SPLIT: Final = "d0  0F0 1F0 1I0 0F1 1F1 0I0 1W0 1I1 0W0 0I1 1W1 1U 0W1 0U"


class Along(Energy):
    """How the energy changes along the input, in forward mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.func.jvp(self.energy, (x,), (torch.ones_like(x),))[1]


# torch's own forward mode compiles some operators with torch.jit.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "recompute", "schedule"),
    in_turns([Forces, Slope, Transformed, Along], ["none", "all"], [SPLIT, "gpipe"]),
)
def test_trains_as_a_plain_loop(
    kind: type[nn.Module], recompute: Any, schedule: str
) -> None:
    """In halves, or with nothing kept between forward and backward."""
    net = chain(nn.Linear(6, 6), kind(), nn.Tanh(), kind(), nn.Linear(6, 8)).double()
    plain = copy.deepcopy(net)
    order = hocket.Schedule.parse(schedule) if schedule == SPLIT else schedule
    with started(
        net, mse, sgd, batches()[0], schedule=order, recompute=recompute
    ) as pipeline:
        for batch in batches():
            pipeline.step(batch)
        found = pipeline.state_dict()
    train_plainly(plain, mse, sgd, batches())
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)
