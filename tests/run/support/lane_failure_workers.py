"""Workers of which one fails in a second lane, while its first waits for a peer."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from hocket.core.schedule import Schedule
from hocket.run.engine.program_run import ProgramRun
from tests.run.support.joined import join
from tests.run.support.program_workers import WIDTH, adamw, make_batches, per_sample

# 1F1 waits for 0F1, which comes after 2F0, which waits for 1F0.
ORDER = Schedule.parse(
    """
net n0 microbatches=2
stage 0 net=n0 device=1
stage 1 net=n0 device=0
stage 2 net=n0 device=1
flow 0>1
flow 1>2
d0    1F1 1B1 1B0 1U
d0.1  1F0
d1    0F0 2F0 0F1 2F1 2B1 2B0 0B1 0B0 0U 2U
"""
)


class FailsInASideLane(nn.Module):
    """A linear layer that raises in threads other than the main one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_pre_hook(_fail_in_a_thread)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer, unless this is a second lane's thread."""
        return torch.tanh(self.linear(x))


def _fail_in_a_thread(module: nn.Module, args: object) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("the second lane has failed")


def train() -> None:
    """Train until the middle stage fails."""
    world = join()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), FailsInASideLane(), nn.Linear(WIDTH, WIDTH)
    ).double()
    batches = make_batches(ORDER.program)
    with ProgramRun(
        ORDER,
        models={"n0": model},
        losses={"n0": per_sample},
        optimizers={"n0": adamw},
        cut_at={"n0": ["1", "2"]},
        example=batches[0],
        world=world,
    ) as run:
        list(run.train(batches))
