"""Runs some cuts before planning, to measure ops and messages on these workers.

    a pipeline of all workers      0F0 0F1 ...      1, 2, ... stages on each
    each worker for itself         F0 B0 F1 B1      as plain data parallelism has it

Nothing is updated, and all state is restored (`run/tune/dry_run.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from hocket.core.costs import Link
from hocket.core.schedule import Schedule
from hocket.model.capture.captured import Captured
from hocket.model.profile.profile import Profile
from hocket.model.profile.work import stage_costs
from hocket.model.stages.cut import cut, num_frozen_stages
from hocket.model.trace.per_sample import num_rows, take_rows
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.stages import Trial
from hocket.run.cluster.layout import make_layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.device.memory import memory_bytes
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.play_plan import plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.engine.worker_context import OpenRun, open_context
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.link_costs import measure_messages
from hocket.run.tune.update_costs import measure_updates
from hocket.run.weights.settings import TrainingConfig
from hocket.schedules import make_schedule

MOST_STAGES: Final = 4  # on a device; more are extrapolated from these
_MICROBATCHES: Final = 4  # for each device: enough of them come between two others
_SMALLER: Final = 4  # the second size of a microbatch: so many times smaller


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
        largest = max(1, self.batch_size // self.num_devices)
        fault = self.captured.right_for[True].fault_of_samples
        right = [x for x in {max(1, largest // _SMALLER), largest} if not fault(x)]
        return tuple(sorted(right or [self.captured.example.num_samples]))

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


def run_trials(
    config: ProfileConfig, profiles: Mapping[int, Profile], world: World
) -> tuple[Trial, ...]:
    """Run cuts of the smaller microbatch, and whole models. All workers must call this.

    Args:
        config: the same on every worker.
        profiles: the layers' profiles, by the number of samples; the same on every
            worker.
        world: all workers: as many as there are devices.
    """
    most_bytes = memory_bytes(world)  # what needs more on a device is not run
    return tuple(
        _played(config, profiles[size], world, size, p, v)
        for size, p, v in _shapes(config, world.world_size)
        if _device_bytes(config.captured, profiles[size], p) < most_bytes
    )


def _shapes(config: ProfileConfig, num_workers: int) -> Iterator[tuple[int, int, int]]:
    """Yield the samples of a microbatch, the devices, and the stages on each."""
    num_layers = len(config.captured.layers)
    sizes = config.sizes
    for size in sizes:
        yield size, 1, 1
    if num_workers == 1:
        return
    for v in sorted(config.stages_per_device):
        if v <= min(MOST_STAGES, num_layers // num_workers):
            yield sizes[0], num_workers, v
    if len(sizes) > 1 and num_workers <= num_layers:
        yield sizes[-1], num_workers, 1


def _device_bytes(captured: Captured, profile: Profile, num_devices: int) -> float:
    """Return about what the fullest device needs: 1F1B holds a whole net's outputs."""
    tensors = captured.state.tensors.values()
    state_bytes = sum(x.nbytes * (2 if x.requires_grad else 1) for x in tensors)
    kept_bytes = sum(x.activation_bytes + x.kept_input_bytes for x in profile.layers)
    return state_bytes / num_devices + kept_bytes


def _played(
    config: ProfileConfig,
    profile: Profile,
    world: World,
    num_samples: int,
    p: int,
    v: int,
) -> Trial:
    ranks = [range(i % p, world.world_size, p) for i in range(p * v)]
    boundaries = profile.balanced(p * v, config.hop, ranks)
    modules = cut(config.captured, boundaries)
    order = freeze_stages(_order(p, v), num_frozen_stages(modules))
    with contextlib.ExitStack() as stack:
        store = dist.PrefixStore(f"trial {next(_num_trials)}", world.store)
        run = OpenRun(world, FlightRecorder(), store, stack, world.timeout_s)
        layout = make_layout(world, world.world_size // p)
        context = open_context("auto", run, layout, order)
        messages = measure_messages(world, context.transport)
        added = stage_costs(profile, boundaries, modules)
        shape = modules, order.program, config.settings, context
        costs = messages.costs(measure_updates(added, *shape))
        (net,) = order.program.nets
        costs = dry_run(
            costs,
            [config.captured],
            order,
            [NetSetup(net.name, modules, (), config.loss, config.settings)],
            {net.name: [config.microbatch(num_samples)]},
            PointToPoint(plan_to_play(order), context),
        )
    return Trial(num_samples, p, boundaries, costs)


def _order(p: int, v: int) -> Schedule:
    name = "1f1b" if v == 1 else "interleaved-1f1b"
    return make_schedule(
        name,
        num_devices=p,
        num_microbatches=_MICROBATCHES * p,
        stages_per_device=None if v == 1 else v,
    )


_num_trials = count()
