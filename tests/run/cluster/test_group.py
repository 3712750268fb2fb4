"""Process groups of torch.distributed that a run makes."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.run.cluster.world import join_world
from tests.run.support.forked import answers_of
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


@pytest.mark.timeout(120)
def test_a_closed_pipeline_leaves_no_threads(tmp_path: Path) -> None:
    """Its groups are destroyed: gloo's threads of 150 pipelines kept two cores busy."""
    answers = answers_of(
        f"{__name__}:num_threads_after_each", 4, num_workers=4, folder=tmp_path
    )
    for numbers in answers:
        assert max(numbers) - numbers[0] < 2, numbers  # one group has two
