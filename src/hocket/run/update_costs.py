"""Measure what an optimizer's step takes, on copies of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.costs import UpdateCost
from hocket.model.stage import StageModule
from hocket.run.update import OptimizerFactory
from hocket.run.world import World

_NUM_STEPS = 5
_CACHE_BYTES = 1 << 24  # gone through before each step: training leaves caches cold


def measure_updates(
    modules: Sequence[StageModule],
    own: Sequence[int],
    make_optimizer: OptimizerFactory,
    world: World,
) -> list[UpdateCost]:
    """The cost of each stage's update, measured by whoever holds it.

    Every worker must call this.

    Args:
        modules: all stages.
        own: the stages of this worker.
        make_optimizer: as for the pipeline; called once more per stage, on copies.
        world: to tell the others.
    """
    measured = {}
    for stage in own:
        cost = _measure(modules[stage].to(world.device), make_optimizer)
        measured[str(stage)] = [cost.seconds, cost.state_bytes]
    costs = [UpdateCost(0.0, 0)] * len(modules)
    for part in world.gather_json(measured, "update costs"):
        assert isinstance(part, dict)
        for stage, (seconds, state_bytes) in part.items():
            costs[int(stage)] = UpdateCost(float(seconds), int(state_bytes))
    return costs


def _measure(module: StageModule, make_optimizer: OptimizerFactory) -> UpdateCost:
    copies = [
        nn.Parameter(p.detach().clone()) for p in module.parameters() if p.requires_grad
    ]
    if not copies:
        return UpdateCost(0.0, 0)
    optimizer = make_optimizer(copies)
    seconds = []
    for _ in range(_NUM_STEPS):
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        passed = torch.zeros(_CACHE_BYTES // 4)
        passed += 1
        begin = perf_counter()
        optimizer.step()
        if copies[0].device.type == "cuda":
            torch.cuda.synchronize(copies[0].device)
        optimizer.zero_grad(set_to_none=True)
        seconds.append(perf_counter() - begin)
    state = pytree.tree_leaves(optimizer.state_dict()["state"])
    return UpdateCost(
        median(seconds[1:]), sum(x.nbytes for x in state if isinstance(x, Tensor))
    )
