"""Puts a pipeline together on one worker from its configuration.

    PipelineConfig ─▶ layout ─▶ PlanConfig ─▶ order ─▶ transport ─▶ Plan ─▶ Executor ┐
                                   │ schedule="auto": chosen here                    │
                                   └ "zb-auto": measured and made here               │
                                     CheckpointManager, Evaluator ──▶ PipelineParts ◀┘

Only the outline of the uncut model is kept here: if the user keeps no reference to it,
the weights of other workers' stages are freed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from hocket.core.schedule import Schedule
from hocket.model.stages.outline import Outline
from hocket.planner.recompute import RecomputeName
from hocket.run.checkpoint.manager import CheckpointManager
from hocket.run.cluster.freed_memory import trim_heap
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.world import World
from hocket.run.comm.transport import NUM_BUFFERS
from hocket.run.comm.transports import TransportName, make_transport
from hocket.run.data.batch import call_arguments, split_batch
from hocket.run.data.loss import LossFunction
from hocket.run.device.out_of_memory import MemoryWatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.evaluate import Evaluator
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.wiring import wire_one_net
from hocket.run.engine.make_executor import make_executor
from hocket.run.engine.plan import Plan
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.engine.refusals import refuse_settings, refuse_without_effect
from hocket.run.engine.worker_context import WorkerContext, open_context
from hocket.run.tune.build import PlanConfig, build_plan
from hocket.run.tune.choose import choose_order
from hocket.run.tune.order import make_order
from hocket.run.tune.repeating_bubble import warn_of_repeating_bubble
from hocket.run.tune.timed_order import is_timed, timed_order
from hocket.run.weights.settings import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """The arguments of `hocket.Pipeline`, which says what each is.

    Args:
        settings: the training settings: those about updates and precision.
    """

    model: nn.Module
    loss: LossFunction
    settings: TrainingConfig
    example: Any
    schedule: str | Path | Schedule
    max_delay: int
    num_microbatches: int
    num_replicas: int
    stages_per_device: int | None
    cut: Sequence[str] | None
    profile_dir: str | Path | None
    recompute: RecomputeName
    compiles: bool
    memory_bytes: int | None
    seed: int
    transport: TransportName

    @property
    def num_parts(self) -> int:
        """Microbatches of a batch, over all replicas."""
        return self.num_microbatches * self.num_replicas

    def plan_config(self) -> PlanConfig:
        """What the plan is made from."""
        parts = split_batch(self.example, self.num_parts)
        return PlanConfig(
            self.model,
            self.loss,
            self.settings,
            parts[0],
            pytree.tree_structure(call_arguments(self.example[0])),
            self.cut,
            None if self.profile_dir is None else Path(self.profile_dir),
            self.recompute,
            self.memory_bytes,
            self.seed,
            max_delay=self.max_delay,
            compiled_for=parts if self.compiles else (),
        )


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The parts of a pipeline.

    Args:
        layout: the ranks by device and replica.
        plan: what will run.
        outline: the uncut model's outline.
        executor: trains.
        checkpoints: saves and loads.
        evaluator: evaluates.
    """

    layout: Layout
    plan: Plan
    outline: Outline
    executor: Executor
    checkpoints: CheckpointManager
    evaluator: Evaluator


def assemble(
    config: PipelineConfig,
    world: World,
    recorder: FlightRecorder,
    stack: contextlib.ExitStack,
    timeout_s: float,
) -> PipelineParts:
    """Decide all that can be decided before the first step, and make the executor.

    Every worker must call this.

    Args:
        config: the same on every worker.
        world: the job.
        recorder: records every op and wait.
        stack: gets what must be closed at the end.
        timeout_s: how long to wait for another worker.

    Raises:
        HocketError: see `hocket.Pipeline`.
    """
    parts = _assembled(config, world, recorder, stack, timeout_s)
    # Capturing and profiling leave reference cycles that hold the weights of all
    # stages. Python collects cycles by the number of objects, not by their bytes.
    gc.collect()
    trim_heap()
    return parts


def _assembled(
    config: PipelineConfig,
    world: World,
    recorder: FlightRecorder,
    stack: contextlib.ExitStack,
    timeout_s: float,
) -> PipelineParts:
    layout = make_layout(world, config.num_replicas)
    plan_config, schedule = config.plan_config(), config.schedule
    stages_per_device, m = config.stages_per_device, config.num_microbatches
    if schedule == "auto":
        plan_config, schedule, stages_per_device = choose_order(
            plan_config, world, layout, m, stages_per_device
        )
    store = _own_store(world)
    clips = config.settings.clip_norm is not None
    if is_timed(schedule, plan_config, stages_per_device):
        own_store = dist.PrefixStore("before the order", store)
        carrier = make_transport(
            config.transport,
            world,
            own_store,
            recorder,
            num_buffers=NUM_BUFFERS,
            timeout_s=timeout_s,
        )
        with closing(carrier):
            context = WorkerContext(
                world, layout, recorder, carrier, own_store, timeout_s
            )
            plan_config, order = timed_order(
                str(schedule), plan_config, context, m, stages_per_device
            )
    else:
        order = make_order(schedule, layout, m, stages_per_device, clips=clips)
    if config.schedule != "auto":  # which may choose one without old weights
        refuse_without_effect(config.settings, order, config.max_delay)
    refuse_settings(config.settings, order)
    name = "" if isinstance(schedule, Schedule) else str(schedule)
    context = open_context(
        config.transport,
        world,
        layout,
        recorder,
        store,
        order,
        stack,
        timeout_s=timeout_s,
        clips=clips,
    )
    plan, play_plan, modules, channels = build_plan(plan_config, name, order, context)
    if world.rank == 0:
        warn_of_repeating_bubble(config.schedule, plan)
    names = [name for name, _ in config.model.named_parameters()]
    (net,) = plan.schedule.program.nets
    executor = make_executor(
        play_plan,
        [NetSetup(net.name, modules, names, config.loss, config.settings)],
        config.settings,
        context,
        channels,
        wiring=wire_one_net(plan.schedule.program, modules),
        seed=config.seed,
        recomputes=[i for i, x in enumerate(plan.costs.stages) if x.recomputes],
        on_error=MemoryWatch(plan.schedule, plan.costs, world, layout.device).on_error,
    )
    stack.callback(executor.sync.give_up)
    outline = Outline.of(config.model)
    checkpoints = CheckpointManager(
        outline, executor, plan, layout, world, recorder, timeout_s=timeout_s
    )
    stack.callback(checkpoints.release)
    evaluator = Evaluator(executor, world, layout, recorder, plan, timeout_s=timeout_s)
    return PipelineParts(layout, plan, outline, executor, checkpoints, evaluator)


_num_pipelines = count()


def _own_store(world: World) -> dist.Store:
    """Return the job's store with a prefix of this pipeline's own.

    Workers make their pipelines in one order, so that equal numbers mean the same one.
    """
    return dist.PrefixStore(f"pipeline {next(_num_pipelines)}", world.store)
