"""Measures a model on all workers for a plan: layers, updates and whole cuts.

    all workers   profile two sizes of a microbatch ─▶ mean ┐
                  step the optimizer on copies ─────────────┼─▶ ModelCosts
                  run some cuts ────────────────────────────┼─▶ Trials
                  reduce over all ──────────────────────────┴─▶ ring

All workers measure at the same time, as they will train at the same time.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hocket.core.op import Kind
from hocket.model.capture.captured import Captured
from hocket.model.profile.held_layers import profile_held
from hocket.model.profile.measure import profile, restored_model
from hocket.model.profile.precision import core_wait_s, timed_rounds
from hocket.model.profile.profile import Profile, mean_profile
from hocket.model.profile.work import measured_work
from hocket.planner.stages import MeasuredTrials, Trial
from hocket.planner.work import ModelCosts
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch, on_device
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.device.memory import memory_bytes
from hocket.run.stage.precision import Precision
from hocket.run.stage.split.by_layers import ByLayers
from hocket.run.tune.trial_runs import ProfileConfig, run_trials
from hocket.run.tune.update_costs import give_gradients
from hocket.run.weights.settings import OptimizerFactory, Parameters

_NUM_STEPS: Final = 10
_NUM_WARM: Final = 3  # DDP rebuilds its buckets after the first

_NUM_UPDATES: Final = 3

Found = TypeVar("Found")


def profile_workers(
    config: ProfileConfig, world: World
) -> tuple[ModelCosts, MeasuredTrials]:
    """Measure on all workers at once. Every worker must call this.

    Args:
        config: the same on every worker.
        world: as many workers as there are devices, or one that represents all.

    Returns:
        The layers' costs; and the trials of whole cuts, and of DDP.
    """
    captured, states = config.captured, config.states
    precision = config.settings.compute_precision
    profiles = {
        size: profile_layers(
            captured, config.microbatch(size), config.loss, precision, world
        )
        for size in config.sizes
    }
    rate = update_s_per_byte(captured, config.settings.make_optimizer, states, world)
    work = measured_work(captured, profiles, states, update_s_per_byte=rate)
    if config.loss is None:
        return work, MeasuredTrials()
    cuts = run_trials(config, profiles, world)
    largest = config.microbatch(config.sizes[-1])
    with precision.autocast(world.device):
        whole_s = ddp_seconds(captured, config.loss, largest, world)
    added_s = _added_by_ddp(whole_s, cuts, largest.num_samples)
    return work, MeasuredTrials(cuts, added_s)


def _added_by_ddp(
    whole_s: float | None, cuts: Sequence[Trial], num_samples: int
) -> float | None:
    """Return what DDP adds to a single worker's forward and backward."""
    alone = next((cut for cut in cuts if cut.is_of(num_samples, 1, ())), None)
    if whole_s is None or alone is None:
        return None
    (cost,) = alone.costs.stages
    plain_s = cost.forward_s + cost.seconds(Kind.BACKWARD)
    return max(0.0, whole_s - plain_s)


def profile_layers(
    captured: Captured,
    microbatch: Microbatch,
    loss: LossFunction | None,
    precision: Precision,
    world: World,
    hold: Callable[[Collection[str]], None] | None = None,
) -> Profile:
    """Return the mean of what all workers measure. Every worker must call this.

    Args:
        captured: the captured model.
        microbatch: what it is measured with.
        loss: the loss; the sum of the outputs if there is none.
        precision: the type that forwards and losses compute in.
        world: all workers.
        hold: gives values to the weights of a layer, where they have none.
    """
    microbatch, device = microbatch.on(world.device), world.device
    finish = None if loss is None else partial(_total, loss, microbatch.targets)
    measure = (
        partial(profile_held, hold=hold)
        if hold is not None
        else partial(
            profile, most_bytes=None if device.type == "cpu" else memory_bytes(world)
        )
    )
    return measured_together(
        partial(
            measure,
            captured,
            microbatch.leaves,
            device=device,
            make_splitter=ByLayers,
            finish=finish,
            targets=microbatch.targets,
        ),
        precision,
        world,
    )


def measured_together(
    measure: Callable[[], Profile], precision: Precision, world: World
) -> Profile:
    """Measure on all workers at the same time, and return the mean.

    Args:
        measure: measures on this worker.
        precision: the type that forwards and losses compute in.
        world: all workers.
    """
    world.barrier("profile")
    with precision.autocast(world.device):
        own, core_wait = watched(measure, world)
    parts = world.gather_json(own.to_json(), "profile measured")
    mean = mean_profile([Profile.from_json(part) for part in parts])
    return replace(mean, core_wait=core_wait)


def watched(measure: Callable[[], Found], world: World) -> tuple[Found, float]:
    """Measure, and say for what part of the time a core was missing.

    Every worker must call this.

    Returns:
        What was found; and the largest part, over all workers, in which one waited for
        a core that others had. 0 if there are too few for hocket's own threads.
    """
    begin_s, begin_wait_s = perf_counter(), core_wait_s()
    found = measure()
    part = (core_wait_s() - begin_wait_s) / (perf_counter() - begin_s)
    num_threads = len(world.same_host) * torch.get_num_threads()
    is_enough = num_threads <= len(os.sched_getaffinity(0))
    return found, max(world.gather_json(part if is_enough else 0.0, "core waits"))


def _total(loss: LossFunction, targets: Any, output: Any) -> Tensor:
    """Return the loss that is trained."""
    return losses_of(loss, output, targets)[TOTAL]


def update_s_per_byte(
    captured: Captured,
    optimizer: OptimizerFactory,
    states: Mapping[str, int],
    world: World,
) -> float:
    """Return the optimizer's seconds per byte. Every worker must call this.

    They are the median over all workers, of steps on copies of all weights.
    """
    copies = {
        name: nn.Parameter(x.detach().to(world.device).clone())
        for name, x in captured.state.tensors.items()
        if x.requires_grad
    }
    own = 0.0
    if copies:
        stepped = optimizer(Parameters(copies))
        seconds: list[float] = []
        for span in timed_rounds(seconds, world.device, _NUM_UPDATES):
            give_gradients(copies.values())
            with span:
                stepped.step()
        num_bytes = 2 * sum(x.nbytes for x in copies.values()) + sum(states.values())
        own = median(seconds) / num_bytes
    return float(median(world.gather_json(own, "update")))


def shares_cores(world: World) -> bool:
    """Return whether workers have no core to spare for reductions."""
    if world.device.type != "cpu":
        return False
    num_threads = len(world.same_host) * torch.get_num_threads()
    return num_threads >= len(os.sched_getaffinity(0))


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

    def step(model: nn.Module) -> None:
        output = model(*args, **kwargs)
        losses_of(loss, output, targets)[TOTAL].backward()

    with restored_model(captured, world.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice does not concern this copy
        for finds_unused in (False, True):
            own_s = _tried(captured.model, step, world, finds_unused=finds_unused)
            by_rank = world.gather_json(own_s, "DDP")
            if all(by_rank):
                return max(map(float, by_rank))
    return None


def _tried(
    model: nn.Module,
    step: Callable[[nn.Module], None],
    world: World,
    *,
    finds_unused: bool,
) -> float:
    """Return the seconds of the steps; 0 if DDP refuses."""
    seconds: list[float] = []
    try:
        own = copy.deepcopy(model).train().to(world.device)
        wrapped = DistributedDataParallel(own, find_unused_parameters=finds_unused)
        for span in timed_rounds(seconds, world.device, _NUM_STEPS, _NUM_WARM):
            world.barrier("DDP")
            with span:
                step(wrapped)
            own.zero_grad(set_to_none=True)
    except (RuntimeError, TypeError, ValueError):  # torch refuses, or has no memory
        return 0.0
    return median(seconds)
