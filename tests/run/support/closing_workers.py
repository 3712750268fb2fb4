"""Workers that make one pipeline after the other in the same job."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hocket.run.cluster.world import join_world
from tests.run.support.started import started


def num_threads_after_each(num_pipelines: int) -> list[int]:
    """Train a step in each of some pipelines; this process's threads when it closed."""
    numbers = []
    with closing(join_world()) as world:
        batch = (torch.ones(4, 3), torch.zeros(4, 3))
        for _ in range(num_pipelines):
            with started(
                nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
                F.mse_loss,
                partial(torch.optim.SGD, lr=0.1),
                batch,
                num_replicas=2,
                world=world,
            ) as pipeline:
                pipeline.step(batch)
            numbers.append(len(os.listdir("/proc/self/task")))
        world.barrier("all have counted")
    return numbers
