"""Workers that train a pipeline whose first stage sends to its last one directly."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Final

import torch.nn.functional as F

import hocket
from hocket.run.cluster.world import join_world
from tests.run.support.program_workers import Branching, adamw, make_batches
from tests.run.support.started import started

ORDER: Final = """steps 1
replicas 1
net model microbatches=3
stage 0 net=model device=0
stage 1 net=model device=1
stage 2 net=model device=0
flow 0>1
flow 0>2
flow 1>2
d0  0F0 0F1 2F0 2B0 0F2 2F1 2B1 2F2 2B2 0B0 0B1 0B2 2U 0U
d1  1F0 1F1 1F2 1B0 1B1 1B2 1U
"""


def train() -> dict[str, float]:
    """Return the largest differences to the emulator, and to its evaluation."""
    schedule = hocket.Schedule.parse(ORDER)
    batches = make_batches(schedule.program)
    model = Branching(0).double()
    alone = copy.deepcopy(model)
    with (
        closing(join_world()) as world,
        started(
            model,
            F.mse_loss,
            adamw,
            batches[0],
            schedule=schedule,
            num_microbatches=3,
            cut=["b", "c"],
            world=world,
        ) as pipeline,
    ):
        for batch in batches:
            pipeline.step(batch)
        evaluated = pipeline.evaluate(batches[:1]).loss
        state = pipeline.state_dict()
    cut_at = ["b", "c"]
    hocket.emulate(schedule.program, alone, F.mse_loss, adamw, batches, cut_at=cut_at)
    inputs, targets = batches[0]
    expected = F.mse_loss(alone.eval()(inputs), targets).item()
    return {
        "weights": max(
            float((state[name] - x).abs().max())
            for name, x in alone.state_dict().items()
        ),
        "evaluation": abs(evaluated - expected),
    }
