"""What forwards replace in a model is no change of the loop, whatever is under way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(120)


class RunningMean(nn.Module):
    """Replaces its buffer in each forward, as many norms do that people write."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """The input without its running mean."""
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def loss(output: Tensor, targets: Tensor, teachers: Any = None) -> Tensor:
    """The targets' squared error, and the teacher's."""
    error = nn.functional.mse_loss(output, targets)
    if teachers is None:
        return error
    return error + nn.functional.mse_loss(output, teachers["t"].own)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_teacher_that_is_ahead_does_not_make_it_the_loops(accumulate: int) -> None:
    """The batches of one step were refused: forwards had run, and none had ended."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), RunningMean(8), nn.Linear(8, 2)).double()
    teacher = nn.Linear(4, 2).double()
    plain = copy.deepcopy(net)
    batches = [
        (torch.randn(6, 4).double(), torch.randn(6, 2).double()) for _ in range(8)
    ]
    with started(
        net,
        loss,
        lambda p: torch.optim.SGD(p, 0.1),
        batches[0],
        teachers={"t": hocket.Teacher(teacher, look_ahead=1)},
        accumulate=accumulate,
        schedule="1f1b",
        num_microbatches=2,
    ) as pipeline:
        found = [result.loss for result in pipeline.train(batches)]
        mean = pipeline.state_dict()["1.mean"]

    sgd, expected = torch.optim.SGD(plain.parameters(), 0.1), list[float]()
    for begin in range(0, len(batches), accumulate):
        sgd.zero_grad()
        total = 0.0
        for x, y in batches[begin : begin + accumulate]:
            for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                output = plain(inputs)
                part = nn.functional.mse_loss(output, targets)
                part = part + nn.functional.mse_loss(output, teacher(inputs).detach())
                (part / (2 * accumulate)).backward()
                total += part.item() / (2 * accumulate)
        sgd.step()
        expected.append(total)
    assert found == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(mean, plain[1].mean, rtol=1e-10, atol=0.0)
