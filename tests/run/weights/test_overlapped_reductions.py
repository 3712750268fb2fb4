"""With replicas, one group's reduction goes on while the other group's work does."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.core.op import Kind, Op
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.started import started

NUM_STEPS: Final = 6
SLOW_S: Final = 0.04  # that the second replica sleeps in each forward of a stage
_sleep_s = 0.0  # of this process


@torch.library.custom_op("hocket_tests::delayed", mutates_args=())
def delayed(x: Tensor) -> Tensor:
    """The same, after a while: an operator, so that captures keep it."""
    time.sleep(_sleep_s)
    return x.clone()


@delayed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


delayed.register_autograd(lambda _, grad: grad)


class Slow(nn.Module):
    """A linear layer that may take its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = delayed(self.linear(x))
        return out


def train() -> dict[str, float]:
    """When each op of this replica's lane began, on a clock that all share."""
    global _sleep_s
    world = join()
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 4)
    data: list[Any] = [(x, y)] * NUM_STEPS
    with started(
        nn.Sequential(Slow(), Slow()),
        F.mse_loss,
        partial(torch.optim.SGD, lr=0.1),
        data[0],
        schedule="wpipe",
        num_replicas=2,
        cut=["1"],
        world=world,
    ) as pipeline:
        _sleep_s = SLOW_S * world.rank
        list(pipeline.train(data))
        schedule, record, _ = pipeline._driver.last()
        starts_s = (record.start_s[0] + world.clock_offset_s).tolist()
        ops = schedule.lanes[0].ops
        return {str(op): start_s for op, start_s in zip(ops, starts_s, strict=True)}


def test_only_its_update_waits_for_a_reduction(tmp_path: Path) -> None:
    """WPipe on two replicas of one device, the second slower.

    The first has begun its reduction, and computes for the other group before the
    second has begun its own. Each group has one reduction a step.
    """
    fast, slow = answers_of(f"{__name__}:train", folder=tmp_path)
    reductions = [
        Op(Kind.REDUCE, stage, None, step)
        for step in range(NUM_STEPS)
        for stage in (1, 0)
    ]
    assert {op for op in fast if "R" in op} == set(map(str, reductions))
    for reduction in reductions[:-2]:  # behind the last step's there is nothing to do
        begin_s, end_s = fast[str(reduction)], slow[str(reduction)]
        meanwhile = [op for op, start_s in fast.items() if begin_s < start_s < end_s]
        others = [op for op in meanwhile if op[0] != str(reduction.stage)]
        assert any("F" in op for op in others), (str(reduction), meanwhile)
