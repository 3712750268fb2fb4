"""Gradients that are one tensor, or one with what was received, become parameters' own.

    W = base + delta               dbase = ddelta = dW      one tensor
    y = h + place, of one sample   dplace = dy              what was received

A pool receives the next gradient where dy lies, and microbatches add to `.grad`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch
from hocket.run.stage.compiled.lower import Backward
from hocket.run.stage.runner import StageRunner
from tests.run.stage.compiled.compiling import CPU, compile_one, function_of
from tests.run.stage.compiled.test_stage import TOLERANCE
from tests.run.stage.split.test_runner import assert_close
from tests.run.support.small_models import classes

NUM, WIDTH = 3, 6


class Summed(nn.Module):
    """A linear layer of sums of parameters, and a place added to each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.delta = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b_ih = nn.Parameter(torch.randn(WIDTH))
        self.b_hh = nn.Parameter(torch.randn(WIDTH))
        self.place = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to y_BW."""
        y = F.linear(torch.tanh(x), self.base + self.delta, self.b_ih + self.b_hh)
        return y + self.place


@pytest.mark.timeout(300)
def test_of_microbatches_of_one_sample() -> None:
    """They add up to those of the stage as it is; with B's, and with I's and W's.

    Past bug: two parameters had one tensor as `.grad`, to which each microbatch was
    added twice; and others had a gradient in memory that another op wrote to.
    """
    torch.manual_seed(5)
    model = nn.Sequential(Summed(), nn.Linear(WIDTH, 3)).double().train()
    x = torch.randn(NUM, WIDTH, dtype=torch.float64)
    parts = [Microbatch((x[i : i + 1],), torch.zeros(1).long(), 1) for i in range(NUM)]
    runners = []
    for is_compiled in (False, True):
        modules = cut(capture(model, (x,), capture="sequential"), (1,))
        if is_compiled:
            compile_one(modules, 0, classes, parts[:1])
        runners.append(StageRunner(0, modules[0], None, device=CPU, seed=0))
    eager, compiled = runners

    for splits in (False, True):
        for runner in runners:
            for parameter in runner.parameters.values():
                parameter.grad = None
            grads = torch.randn(
                NUM, WIDTH, dtype=torch.float64, generator=torch.manual_seed(1)
            )
            for m, part in enumerate(parts):
                run(runner, m, part, grads[m : m + 1], splits=splits)
        assert_close(eager, compiled, TOLERANCE)
        places = {
            p.grad.untyped_storage().data_ptr()
            for p in compiled.parameters.values()
            if p.grad is not None
        }
        assert len(places) == len(compiled.parameters) == 5
    assert function_of(compiled).num_calls == 2 * NUM


def run(
    runner: StageRunner, m: int, part: Microbatch, grad: Tensor, *, splits: bool
) -> None:
    """Forward and backward; then something else comes where the gradient was."""
    runner.forward(0, m, part, (), 1.0, splits=splits)
    if splits:
        runner.input_gradients(0, m, (grad,))[1].finish()
    else:
        runner.backward(0, m, (grad,))
    grad.fill_(float("nan"))


def test_what_is_copied() -> None:
    """Of gradients in one place all but the first, and any where others lie, too."""

    def function(given: list[Tensor]) -> list[Tensor]:
        """An input, a part of it, what is held, a part of that, and one twice."""
        (received,) = given
        held, alone = torch.ones(2), torch.ones(2)
        return [received, received[:1], held[1:], alone, alone, held]

    backward = Backward(function, added=(), returned=(7, 0, 1, 2, 3))
    weights = {i: torch.zeros(2) for i in range(4)}  # 7 is an input of the stage
    received = torch.ones(2)
    results = backward.run([received], weights)
    shared = backward.shared_places([received], results, weights)
    assert shared == (1, 2, 4)

    copying = Backward(function, (), backward.returned, shared)
    results = copying.run([received], weights)
    assert results[0] is received
    assert copying.shared_places([received], results, weights) == ()
