"""Put a pipeline together on one worker, from what its user wants.

    Wishes ─▶ layout ─▶ Request ─▶ order ─▶ transport ─▶ Plan, stages ─▶ Executor ┐
                          │ schedule="auto": chosen here                      ├─▶ Parts
                          └ "zb-auto": measured here, and made for that       │
                                       what saves and loads, what evaluates ──┘

Of the uncut model nothing stays here but its outline: whoever gave the pipeline the
only reference to it has the other workers' weights freed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from hocket.core.schedule import Schedule
from hocket.model.stages.outline import Outline
from hocket.planner.recompute import RecomputeName
from hocket.run.checkpoint.keeper import Checkpoints
from hocket.run.cluster.freed_memory import give_back_freed_memory
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.world import World
from hocket.run.comm.transport import NUM_BUFFERS, Transport
from hocket.run.comm.transports import TransportName, buffers_of, make_transport
from hocket.run.data.batch import call_arguments, split_batch
from hocket.run.data.loss import LossFunction
from hocket.run.device.open import open_device
from hocket.run.diagnostics.flight_recorder import Ring
from hocket.run.engine.evaluate import Evaluator
from hocket.run.engine.executor import Executor
from hocket.run.engine.make_executor import make_executor
from hocket.run.engine.plan import Plan
from hocket.run.engine.refusals import refuse_settings, refuse_without_effect
from hocket.run.engine.worker_context import Place
from hocket.run.tune.build import Request, build_plan
from hocket.run.tune.choose import choose_order
from hocket.run.tune.order import make_order
from hocket.run.tune.repeating_bubble import warn_of_repeating_bubble
from hocket.run.tune.timed_order import is_timed, timed_order
from hocket.run.weights.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user wants; `hocket.Pipeline` says what each is.

    Args:
        settings: how to train: all that is about updates and precision.
    """

    model: nn.Module
    loss: LossFunction
    settings: Settings
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

    def request(self) -> Request:
        """What the plan is made from."""
        parts = split_batch(self.example, self.num_parts)
        return Request(
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
class Parts:
    """What a pipeline is made of.

    Args:
        layout: of the ranks.
        plan: what runs.
        outline: of the uncut model.
        executor: trains.
        checkpoints: saves and loads.
        evaluator: evaluates.
    """

    layout: Layout
    plan: Plan
    outline: Outline
    executor: Executor
    checkpoints: Checkpoints
    evaluator: Evaluator


def assemble(
    wishes: Wishes,
    world: World,
    ring: Ring,
    stack: contextlib.ExitStack,
    timeout_s: float,
) -> Parts:
    """Decide all that can be decided before the first step, and make what plays it.

    Every worker must call this.

    Args:
        wishes: the same on every worker.
        world: the job.
        ring: told of every op and wait.
        stack: what must be closed at the end is left there.
        timeout_s: after which a wait for another worker ends.

    Raises:
        HocketError: as `hocket.Pipeline`.
    """
    parts = _assembled(wishes, world, ring, stack, timeout_s)
    # What captured and profiled the model refers in circles to itself and to the
    # weights of all stages. Python looks for circles when many objects have been made;
    # that tensors are large does not count.
    gc.collect()
    give_back_freed_memory()
    return parts


def _assembled(
    wishes: Wishes,
    world: World,
    ring: Ring,
    stack: contextlib.ExitStack,
    timeout_s: float,
) -> Parts:
    layout = make_layout(world, wishes.num_replicas)
    request, schedule = wishes.request(), wishes.schedule
    stages_per_device, m = wishes.stages_per_device, wishes.num_microbatches
    if schedule == "auto":
        request, schedule, stages_per_device = choose_order(
            request, world, layout, m, stages_per_device
        )
    store = _own_store(world)
    clips = wishes.settings.clip_norm is not None
    if is_timed(schedule, request, stages_per_device):
        apart = dist.PrefixStore("before the order", store)
        with closing(_transport(wishes, world, apart, ring, timeout_s)) as carrier:
            place = Place(world, layout, ring, carrier, apart, timeout_s)
            request, order = timed_order(
                str(schedule), request, place, m, stages_per_device
            )
    else:
        order = make_order(schedule, layout, m, stages_per_device, clips=clips)
    if wishes.schedule != "auto":  # which may choose one without old weights
        refuse_without_effect(wishes.settings, order, wishes.max_delay)
    refuse_settings(wishes.settings, order)
    num_buffers = buffers_of(order, clips=clips)
    carrier = _transport(wishes, world, store, ring, timeout_s, num_buffers)
    stack.callback(carrier.close)
    name = "" if isinstance(schedule, Schedule) else str(schedule)
    place = Place(world, layout, ring, carrier, store, timeout_s)
    num_lanes = len(order.lanes_of(layout.device))
    if num_lanes > 1:
        lanes = open_device(world.device, num_lanes, timeout_s=timeout_s)
        stack.callback(lanes.close)
        place = replace(place, lanes=lanes)
    plan, play_plan, modules, channels = build_plan(request, name, order, place)
    if world.rank == 0:
        warn_of_repeating_bubble(wishes.schedule, plan)
    executor = make_executor(
        plan,
        play_plan,
        wishes.model,
        modules,
        wishes.loss,
        wishes.settings,
        place,
        channels,
        seed=wishes.seed,
    )
    stack.callback(executor.sync.give_up)
    outline = Outline.of(wishes.model)
    checkpoints = Checkpoints(
        outline, executor, plan, layout, world, ring, timeout_s=timeout_s
    )
    stack.callback(checkpoints.release)
    evaluator = Evaluator(executor, world, layout, ring, plan, timeout_s=timeout_s)
    return Parts(layout, plan, outline, executor, checkpoints, evaluator)


def _transport(
    wishes: Wishes,
    world: World,
    store: dist.Store,
    ring: Ring,
    timeout_s: float,
    num_buffers: int = NUM_BUFFERS,
) -> Transport:
    return make_transport(
        wishes.transport,
        world,
        store,
        ring,
        num_buffers=num_buffers,
        timeout_s=timeout_s,
    )


_num_pipelines = count()


def _own_store(world: World) -> dist.Store:
    """The job's store, with a prefix of this pipeline's own.

    Workers make their pipelines in one order, so that equal numbers mean the same one.
    """
    return dist.PrefixStore(f"pipeline {next(_num_pipelines)}", world.store)
