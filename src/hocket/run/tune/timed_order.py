"""Makes orders that depend on measured times, before the first step.

    all workers   profile layers, send messages, step optimizers ─▶ costs ─┐
    rank 0                                   memory_bytes ─▶ make the order ─▶ all

The messages that are timed go through a transport of their own: how many buffers the
final one needs is known when there is an order.

    zb-auto          the order itself is made for F, I, W, messages and the memory
    ooo-modulo       so many stages per device as make the shortest step
    reverse-first-k  buckets of gradients, and how many come last (buckets.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import FitError
from hocket.model.stages.cut import num_frozen_stages
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.recompute import recomputing
from hocket.planner.stages import stage_costs
from hocket.planner.work import LayerCost
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.layout import Layout
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.buckets import bucketed_order
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, cut_and_measure, messages_of
from hocket.run.tune.cut.profiled_model import ProfiledModel, profile_model
from hocket.run.tune.link_costs import usual_cluster
from hocket.run.tune.order import configured_order, make_order
from hocket.schedules import SCHEDULES

_MODULO: Final = "ooo-modulo"
_AS_FAST: Final = 1e-9  # of a step: smaller differences are ignored


def is_timed(config: PipelineConfig) -> bool:
    """Return whether the order depends on measured times."""
    schedule = config.schedule
    return (
        takes_costs(schedule)
        or has_free_stages(config)
        or (isinstance(schedule, str) and _is_data_parallel(schedule))
    )


def has_free_stages(config: PipelineConfig) -> bool:
    """Return whether the number of stages per device is chosen for measured times."""
    is_free = config.stages_per_device is None and config.cut is None
    return config.schedule == _MODULO and is_free


def timed_order(
    config: PipelineConfig, context: WorkerContext, known: ProfiledModel | None
) -> tuple[Schedule, ProfiledModel | CutModel]:
    """Measure and make the order. Every worker must call this, and gets the same.

    Args:
        config: a configuration for which `is_timed` holds.
        context: this worker's context, with a transport that is used for nothing else.
        known: the profiled model, if it was profiled already.

    Returns:
        The order, and what was measured for it.

    Raises:
        FitError: no order of this name fits the memory; names the smallest memory that
            works.
        PlanError: the schedule refuses the numbers.
        ModelError: the model cannot be captured or cut as asked.
    """
    name = str(config.schedule)
    if takes_costs(name):
        return _for_costs(name, config, context, known)
    if _is_data_parallel(name):
        return bucketed_order(config, context, known)
    known = profile_model(config, context.world) if known is None else known
    v = _stages_per_device(config, known, context)
    return configured_order(replace(config, stages_per_device=v), context.layout), known


def takes_costs(schedule: object) -> bool:
    """Return whether a schedule's order is made for measured costs."""
    is_named = isinstance(schedule, str) and schedule in SCHEDULES
    return is_named and "costs" in SCHEDULES[str(schedule)].options


def _is_data_parallel(name: str) -> bool:
    return name in SCHEDULES and SCHEDULES[name].is_data_parallel


def _for_costs(
    name: str,
    config: PipelineConfig,
    context: WorkerContext,
    known: ProfiledModel | None,
) -> tuple[Schedule, CutModel]:
    """Make the order for measured costs."""
    world = context.world
    # Whatever its costs, it has these stages.
    first = configured_order(config, context.layout)
    found = cut_and_measure(config, first.program, context, known)
    most = config.memory_of(world)

    def decide() -> str:
        return str(order_for_costs(config, context.layout, first, found, most))

    config.report(f"making the order of {name}")
    text = decide_on_rank_0(world, decide, f"order of {name}")
    return Schedule.parse(text), found


def order_for_costs(
    config: PipelineConfig, layout: Layout, first: Schedule, found: CutModel, most: int
) -> Schedule:
    """Make an order for the costs of its stages.

    Args:
        config: the pipeline's, with the schedule's name.
        layout: the ranks by device and replica.
        first: its order for any costs.
        found: its stages, and their costs.
        most: the bytes that it may take on each device.

    Raises:
        FitError: no order of this name fits the memory.
    """
    name = str(config.schedule)
    make = partial(configured_order, config, layout)
    takes_memory = "memory_bytes" in SCHEDULES[name].options
    options: dict[str, Any] = {"memory_bytes": most} if takes_memory else {}
    *before, last = _recomputing(config, first, found)
    for costs in before:  # the fewer recompute, the better
        try:
            return make(costs=costs, **options)
        except FitError:
            continue
    return make(costs=last, **options)


def _recomputing(
    config: PipelineConfig, order: Schedule, found: CutModel
) -> Iterator[Costs]:
    """Yield costs to try in turn, with fewer and more stages that recompute."""
    order = freeze_stages(order, num_frozen_stages(found.modules))
    if config.recompute != "all":
        yield recomputing("none", order, found.costs)
    if config.recompute != "none":
        yield recomputing("all", order, found.costs)


def _stages_per_device(
    config: PipelineConfig, known: ProfiledModel, context: WorkerContext
) -> int:
    """Choose how many groups of layers each device gets."""
    messages = messages_of(known, config, context)
    most = len(known.captured.layers) // context.layout.num_devices
    if most <= 1:
        return 1

    layout, hop = context.layout.every[0], usual_cluster(context.world).hop

    def step_s(layers: Sequence[LayerCost], v: int) -> float:
        """Predict one step with groups of layers of nearly equal time."""
        num_stages = layout.num_devices * v
        ranks = [layout.ranks_of(i % layout.num_devices) for i in range(num_stages)]
        stages = stage_costs(
            layers,
            known.profile.balanced(num_stages, hop, ranks),
            recomputes=config.recompute == "all",
            update_s_per_byte=0.0,  # the same whatever the groups
        )
        order = make_order(_MODULO, layout, config.num_microbatches, v)
        return simulate(order, messages.costs(stages)).makespan_s

    def decide() -> int:
        num_samples = config.microbatches()[0].num_samples
        layers = known.work(config).layers(num_samples)
        steps_s = {v: step_s(layers, v) for v in range(1, most + 1)}
        enough_s = min(steps_s.values()) * (1 + _AS_FAST)
        return min(v for v, own_s in steps_s.items() if own_s <= enough_s)

    name = f"stages per device of {_MODULO}"
    return int(decide_on_rank_0(context.world, decide, name))
