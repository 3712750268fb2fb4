"""Times a step under DistributedDataParallel, for the planner."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from statistics import median
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.model.capture.captured import Captured
from hocket.model.profile.clock import clock_of
from hocket.model.profile.measure import restored_model
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch, on_device
from hocket.run.data.loss import TOTAL, LossFunction, losses_of

_NUM_STEPS: Final = 13
_NUM_WARM: Final = 3  # DDP rebuilds its buckets after the first


def ddp_seconds(
    captured: Captured, loss: LossFunction, microbatch: Microbatch, world: World
) -> float | None:
    """The seconds of forward and backward under DDP. Every worker must call this.

    A copy of the model runs, on all workers at once.

    Args:
        captured: the captured model.
        loss: the loss of a microbatch.
        microbatch: each worker's part of the batch.
        world: all workers.

    Returns:
        The median; None for a single worker, or if DDP cannot train the model.
    """
    if world.world_size == 1:
        return None
    example = captured.example.resized(microbatch.num_samples).call()
    args, kwargs = on_device(example, world.device)
    targets = on_device(microbatch.targets, world.device)

    def step_of(model: nn.Module) -> Callable[[], None]:
        def step() -> None:
            output = model(*args, **kwargs)
            losses_of(loss, output, targets)[TOTAL].backward()

        return step

    with restored_model(captured, world.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice does not concern this copy
        for finds_unused in (False, True):
            own_s = _tried(captured.model, step_of, world, finds_unused=finds_unused)
            by_rank = world.gather_json(own_s, "DDP")
            if all(by_rank):
                return max(map(float, by_rank))
    return None


def _tried(
    model: nn.Module,
    step_of: Callable[[nn.Module], Callable[[], None]],
    world: World,
    *,
    finds_unused: bool,
) -> float:
    """Return the seconds of the steps; 0 if DDP refuses."""
    clock = clock_of(world.device)
    seconds = []
    try:
        own = copy.deepcopy(model).train().to(world.device)
        step = step_of(
            DistributedDataParallel(own, find_unused_parameters=finds_unused)
        )
        for _ in range(_NUM_STEPS):
            world.barrier("DDP")
            begin = clock()
            step()
            seconds.append(clock() - begin)
            own.zero_grad(set_to_none=True)
    except (RuntimeError, TypeError, ValueError):  # torch refuses, or has no memory
        return 0.0
    return median(seconds[_NUM_WARM:])
