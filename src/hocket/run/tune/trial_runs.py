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
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from hocket.core.costs import Link
from hocket.core.schedule import Schedule
from hocket.model.capture.captured import Captured
from hocket.model.profile.clock import clock_of
from hocket.model.profile.costs import stage_costs
from hocket.model.profile.profile import Profile
from hocket.model.stages.cut import cut, num_frozen_stages
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.stages import Trial
from hocket.run.cluster.group import GroupMaker
from hocket.run.cluster.layout import make_layout
from hocket.run.cluster.world import World
from hocket.run.comm.transports import buffers_needed, make_transport, talking_ranks
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.play_plan import plan_to_play
from hocket.run.engine.lanes.wiring import wire_one_net
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.link_costs import measure_messages
from hocket.run.tune.update_costs import measure_updates
from hocket.run.weights.settings import TrainingConfig
from hocket.schedules import make_schedule

MOST_STAGES: Final = 4  # on a device; more are extrapolated from these
_MICROBATCHES: Final = 4  # for each device: enough of them come between two others
_SIZES: Final = (
    1 << 14,
    1 << 23,
)  # bytes of a reduction: all latency; mostly bandwidth
_NUM_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """What is run.

    Args:
        captured: the captured model.
        loss: the loss of a microbatch.
        settings: the training settings.
        profiles: the layers' profiles, by the number of samples; the same on every
            worker.
        microbatches: microbatches, by the number of samples; the same on every worker.
        most_bytes: each device's memory; what needs more is not run.
        hop: the link that the plan's balanced cuts count on.
    """

    captured: Captured
    loss: LossFunction
    settings: TrainingConfig
    profiles: Mapping[int, Profile]
    microbatches: Mapping[int, Microbatch]
    most_bytes: int
    hop: Link


def run_trials(
    config: TrialConfig, world: World, stages_per_device: Sequence[int]
) -> tuple[Trial, ...]:
    """Run cuts of the smaller microbatch, and whole models. All workers must call this.

    Args:
        config: the same on every worker.
        world: all workers: as many as there are devices.
        stages_per_device: the numbers of stages per device that a plan may have.
    """
    return tuple(
        _played(config, world, *shape)
        for shape in _shapes(config, world.world_size, stages_per_device)
        if _device_bytes(config, *shape[:2]) < config.most_bytes
    )


def measure_ring(world: World) -> Link | None:
    """Measure an all-reduce of all workers at once. Every worker must call this.

    Returns:
        The link of a ring; None for a single worker.
    """
    if world.world_size == 1:
        return None
    small_s, large_s = (_reduced_s(world, size) for size in _SIZES)
    measured = [float(x) for x in world.broadcast_json([small_s, large_s], name="ring")]
    num_messages = 2 * (world.world_size - 1)
    s_per_byte = max(0.0, measured[1] - measured[0]) / (_SIZES[1] - _SIZES[0])
    latency_s = max(0.0, measured[0] - s_per_byte * _SIZES[0]) / num_messages
    per_message = s_per_byte * world.world_size / num_messages
    return Link(latency_s, 1.0 / per_message) if per_message else Link(latency_s)


def _shapes(
    config: TrialConfig, num_workers: int, stages_per_device: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the samples of a microbatch, the devices, and the stages on each."""
    num_layers = len(config.captured.layers)
    sizes = sorted(config.profiles)
    for size in sizes:
        yield size, 1, 1
    if num_workers == 1:
        return
    for v in sorted(stages_per_device):
        if v <= min(MOST_STAGES, num_layers // num_workers):
            yield sizes[0], num_workers, v
    if len(sizes) > 1 and num_workers <= num_layers:
        yield sizes[-1], num_workers, 1


def _device_bytes(config: TrialConfig, num_samples: int, num_devices: int) -> float:
    """Return about what the fullest device needs: 1F1B holds a whole net's outputs."""
    tensors = config.captured.state.tensors.values()
    state_bytes = sum(x.nbytes * (2 if x.requires_grad else 1) for x in tensors)
    layers = config.profiles[num_samples].layers
    kept_bytes = sum(x.activation_bytes + x.kept_input_bytes for x in layers)
    return state_bytes / num_devices + kept_bytes


def _played(
    config: TrialConfig, world: World, num_samples: int, p: int, v: int
) -> Trial:
    profile = config.profiles[num_samples]
    ranks = [range(i % p, world.world_size, p) for i in range(p * v)]
    boundaries = profile.balanced(p * v, config.hop, ranks)
    modules = cut(config.captured, boundaries)
    order = freeze_stages(_order(p, v), num_frozen_stages(modules))
    with contextlib.ExitStack() as stack:
        context = _context(world, p, order, stack)
        messages = measure_messages(world, context.transport)
        costs = stage_costs(
            profile,
            boundaries,
            modules,
            link=messages.link,
            handling=messages.handling,
            updates=measure_updates(modules, order.program, config.settings, context),
        )
        (net,) = order.program.nets
        costs = dry_run(
            costs,
            [config.captured],
            order,
            [NetSetup(net.name, modules, (), config.loss, config.settings)],
            wire_one_net(order.program, modules),
            {net.name: [config.microbatches[num_samples]]},
            config.settings,
            context,
            context.channels(plan_to_play(order)),
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


def _context(
    world: World, num_devices: int, order: Schedule, stack: contextlib.ExitStack
) -> WorkerContext:
    store = dist.PrefixStore(f"trial {next(_num_trials)}", world.store)
    recorder = FlightRecorder()
    layout = make_layout(world, world.world_size // num_devices)
    transport = make_transport(
        "auto",
        world,
        store,
        recorder,
        num_buffers=buffers_needed(order),
        timeout_s=world.timeout_s,
        pairs=talking_ranks(order, layout),
    )
    stack.callback(transport.close)
    maker = GroupMaker(world.rank, world.timeout_s, recorder.wait)
    groups = stack.enter_context(maker)
    return WorkerContext(
        world, layout, recorder, transport, store, groups, world.timeout_s
    )


_num_trials = count()


def _reduced_s(world: World, num_bytes: int) -> float:
    gradients = torch.zeros(num_bytes // 4, device=world.device)
    clock, everyone = clock_of(world.device), world.everyone
    seconds = []
    for _ in range(_NUM_ROUNDS):
        world.barrier("ring")
        begin = clock()
        everyone.wait(everyone.all_reduce(gradients, "ring"), "ring")
        seconds.append(clock() - begin)
    return median(seconds[1:])
