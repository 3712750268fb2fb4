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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from hocket.core.costs import Link
from hocket.core.op import Kind
from hocket.model.capture.captured import Captured
from hocket.model.profile.clock import clock_of
from hocket.model.profile.measure import profile, restored_model
from hocket.model.profile.profile import Profile, mean_profile
from hocket.model.profile.work import measured_work
from hocket.model.trace.per_sample import num_rows, take_rows
from hocket.planner.stages import MeasuredTrials, Trial
from hocket.planner.work import ModelCosts
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch, on_device
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.device.memory import memory_bytes
from hocket.run.stage.precision import Precision
from hocket.run.stage.split.by_layers import ByLayers
from hocket.run.tune.trial_runs import TrialConfig, measure_ring, run_trials
from hocket.run.weights.settings import OptimizerFactory, Parameters, TrainingConfig

_NUM_STEPS: Final = 13
_NUM_WARM: Final = 3  # DDP rebuilds its buckets after the first

_SMALLER: Final = 4  # the second size of a microbatch: so many times smaller
_NUM_UPDATES: Final = 3
_GRADIENT: Final = 1e-3  # of each element; zeros take AdamW twice as long on a CPU


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """The model and settings that a plan is made for.

    Args:
        captured: the captured model.
        targets: the targets of the example's samples.
        loss: as for a pipeline; the sum of the outputs when not given.
        settings: as for a pipeline.
        states: bytes of the optimizer's state, by parameter.
        batch_size: samples per step.
        num_devices: the number of devices to plan for.
        stages_per_device: the numbers of stages per device to consider.
        hop: the link that the plan's balanced cuts count on.
    """

    captured: Captured
    targets: Any
    loss: LossFunction | None
    settings: TrainingConfig
    states: Mapping[str, int]
    batch_size: int
    num_devices: int
    stages_per_device: Sequence[int]
    hop: Link

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in samples, of the microbatches to measure, ascending."""
        if self.captured.fixed_batch:
            return (self.captured.example.num_samples,)
        largest = max(1, self.batch_size // self.num_devices)
        return tuple(sorted({max(1, largest // _SMALLER), largest}))

    def microbatch(self, num_samples: int) -> Microbatch:
        """Return a microbatch of any size, with repeated rows of the example."""
        example = self.captured.example
        return Microbatch(
            tuple(example.resized(num_samples).leaves),
            resized(self.targets, example.num_samples, num_samples),
            num_samples,
        )


def resized(targets: Any, known: int, num_samples: int) -> Any:
    """Return targets for so many samples, repeating the example's.

    Args:
        targets: the example's targets; tensors of other lengths stay as they are.
        known: the number of samples in the example.
        num_samples: the number of samples to return.
    """
    rows = torch.arange(num_samples) % known
    return pytree.tree_map(
        lambda leaf: take_rows(leaf, rows) if num_rows(leaf) == known else leaf, targets
    )


@dataclass(frozen=True, slots=True)
class WorkerProfiles:
    """What was measured on the workers.

    Args:
        work: the layers' costs.
        trials: the trials of whole cuts, and of DDP.
        ring: the link of an all-reduce; None if nothing was reduced.
        shares_cores: whether workers have no core to spare for reductions.
    """

    work: ModelCosts
    trials: MeasuredTrials
    ring: Link | None
    shares_cores: bool


def profile_workers(config: ProfileConfig, world: World) -> WorkerProfiles:
    """Measure on all workers at once. Every worker must call this.

    Args:
        config: the same on every worker.
        world: as many workers as there are devices, or one that represents all.
    """
    captured, device = config.captured, world.device
    microbatches = {size: config.microbatch(size) for size in config.sizes}
    precision = config.settings.compute_precision
    profiles = {
        size: profile_layers(captured, microbatch, config.loss, precision, world)
        for size, microbatch in microbatches.items()
    }
    make_optimizer = config.settings.make_optimizer
    rate = update_s_per_byte(captured, make_optimizer, config.states, device)
    work = measured_work(
        captured,
        profiles,
        config.states,
        update_s_per_byte=median(world.gather_json(rate, "update")),
    )
    trials = MeasuredTrials()
    if config.loss is not None:
        subject = TrialConfig(
            captured,
            config.loss,
            config.settings,
            profiles,
            microbatches,
            memory_bytes(world),
            config.hop,
        )
        cuts = run_trials(subject, world, config.stages_per_device)
        largest = microbatches[config.sizes[-1]]
        with precision.autocast(device):
            whole_s = ddp_seconds(captured, config.loss, largest, world)
        trials = MeasuredTrials(cuts, _added_by_ddp(whole_s, cuts, largest.num_samples))
    return WorkerProfiles(work, trials, measure_ring(world), _shares_cores(world))


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
) -> Profile:
    """Return the mean of what all workers measure. Every worker must call this.

    Args:
        captured: the captured model.
        microbatch: what it is measured with.
        loss: the loss; the sum of the outputs if there is none.
        precision: the type that forwards and losses compute in.
        world: all workers.
    """
    microbatch = microbatch.on(world.device)
    return measured_together(
        partial(
            profile,
            captured,
            microbatch.leaves,
            device=world.device,
            make_splitter=ByLayers,
            finish=None if loss is None else partial(_total, loss, microbatch.targets),
            targets=microbatch.targets,
            most_bytes=None if world.device.type == "cpu" else memory_bytes(world),
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
        own = measure()
    parts = world.gather_json(own.to_json(), "profile measured")
    return mean_profile([Profile.from_json(part) for part in parts])


def _total(loss: LossFunction, targets: Any, output: Any) -> Tensor:
    """Return the loss that is trained."""
    return losses_of(loss, output, targets)[TOTAL]


def update_s_per_byte(
    captured: Captured,
    optimizer: OptimizerFactory,
    states: Mapping[str, int],
    device: torch.device,
) -> float:
    """Return the optimizer's seconds per byte, from steps on copies of all weights."""
    copies = {
        name: nn.Parameter(x.detach().to(device).clone())
        for name, x in captured.state.tensors.items()
        if x.requires_grad
    }
    if not copies:
        return 0.0
    stepped = optimizer(Parameters(copies))
    clock = clock_of(device)
    seconds = []
    for _ in range(_NUM_UPDATES + 1):
        for weight in copies.values():
            weight.grad = torch.full_like(weight, _GRADIENT)
        begin = clock()
        stepped.step()
        seconds.append(clock() - begin)
    num_bytes = 2 * sum(x.nbytes for x in copies.values()) + sum(states.values())
    return median(seconds[1:]) / num_bytes


def _shares_cores(world: World) -> bool:
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
