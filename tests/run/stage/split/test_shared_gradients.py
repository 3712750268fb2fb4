"""Gradients that are one tensor, or one with what was received, become parameters' own.

The same as `tests/run/stage/compiled/test_shared_gradients.py`, for split backwards.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.model.stages.splitter import MakeSplitter
from hocket.run.data.batch import Microbatch
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.by_layers import ByLayers
from tests.run.stage.compiled.test_shared_gradients import NUM, WIDTH, Summed
from tests.run.stage.split.test_runner import CPU, grads_of
from tests.run.support.comparison import difference
from tests.run.support.split_by_graph import ByGraph


@pytest.mark.parametrize("make_splitter", [ByLayers, ByGraph])
def test_of_microbatches_of_one_sample(make_splitter: MakeSplitter) -> None:
    """They add up to those of whole backwards, whatever comes where one was received.

    Past bug: of `base + delta`, both had one tensor as `.grad`, to which each
    microbatch was added twice; and that of what is added at the end lay in the memory
    of a message.
    """
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Summed(), nn.Linear(WIDTH, 3))
    x = torch.randn(NUM, WIDTH, dtype=torch.float64)
    captured = capture(model.double().train(), (x,), capture="sequential")
    found = []
    for in_halves in (False, True):
        (_, module, _) = cut(captured, (1, 2))
        runner = StageRunner(
            1, module, None, device=CPU, seed=0, make_splitter=make_splitter
        )
        for parameter in runner.parameters.values():
            parameter.grad = None
        for m in range(NUM):
            sample = x[m : m + 1]
            part = Microbatch((sample,), torch.zeros(1).long(), 1)
            grad = torch.cos(sample)
            runner.forward(0, m, part, (sample,), 1.0, splits=in_halves)
            if in_halves:
                runner.input_gradients(0, m, (grad,))[1].finish()
            else:
                runner.backward(0, m, (grad,))
            grad.fill_(float("nan"))
        found.append(grads_of(runner))

    whole, halves = found
    for name, expected in whole.items():
        actual = halves[name]
        assert actual is not None
        assert expected is not None
        assert difference(actual, expected) < 1e-12, name
