"""Cuts a profiled model into stages, and measures what its profile lacks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from warnings import warn

from torch import nn

from hocket.core.costs import Costs, Link
from hocket.core.program import Program
from hocket.errors import ModelError
from hocket.freeze.shapes import greedy_boundaries
from hocket.model.capture.captured import Captured
from hocket.model.profile.work import stage_costs
from hocket.model.stages.cut import boundaries_from_names, check_as_is, cut
from hocket.model.stages.stage import StageModule
from hocket.model.weights.given import GivenWeights
from hocket.planner.cluster import MessageCosts
from hocket.run.cluster.freed_memory import trim_heap
from hocket.run.engine.same_everywhere import refuse_different_weights
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.kept import kept_costs
from hocket.run.tune.cut.profiled_model import ProfiledModel, profile_model
from hocket.run.tune.link_costs import (
    measure_messages,
    measure_ring,
    usual_cluster,
)
from hocket.run.tune.teachers.stages import CutTeacher
from hocket.run.tune.update_costs import measure_updates


@dataclass(frozen=True, slots=True)
class CutModel:
    """A model's stages and their costs, before there is an order.

    Args:
        known: the profiled model.
        boundaries: the layers at which stages 1, 2, ... begin.
        modules: all stages.
        costs: the stages' costs as sums of single layers, and of messages; no stage
            recomputes.
        teachers: the teachers, whose stages come before the model's in `modules` and
            `costs`.
    """

    known: ProfiledModel
    boundaries: tuple[int, ...]
    modules: tuple[StageModule, ...]
    costs: Costs
    teachers: tuple[CutTeacher, ...] = ()


def cut_and_measure(
    config: PipelineConfig,
    program: Program,
    context: WorkerContext,
    known: ProfiledModel | None,
    boundaries: Sequence[int] | None = None,
) -> CutModel:
    """Cut the model and measure what its profile lacks. Every worker must call this.

    Args:
        config: the pipeline's.
        program: the number of stages, and their devices.
        context: this worker's context.
        known: the profiled model, if it was profiled already.
        boundaries: the layers at which stages 1, 2, ... begin; balanced, or as the
            configuration says, when not given.

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        SchemaError: the workers have different models or settings.
    """
    world = context.world
    if known is None:
        known = profile_model(config, world, program.num_stages)
    if world.device.type != "cpu" and context.layout.tp_size == 1:
        config.model.cpu()  # each worker moves its own stages to its device
    if boundaries is None and config.balance == "greedy" and config.cut is None:
        sizes = known.captured.parameters_in_millions
        boundaries = greedy_boundaries(sizes, program.num_stages)
    elif boundaries is None:
        boundaries = balanced_boundaries(known, program, config, context)
    check_as_is(known.captured, boundaries, program.flows)
    modules = cut(known.captured, boundaries, program.flows)
    hold_own(config, known.captured, modules, program, context)

    def measure() -> Costs:
        messages = messages_of(known, config, context)
        config.report("measuring updates")
        added = stage_costs(known.profile, boundaries, modules)
        costs = messages.costs(
            measure_updates(added, modules, program, config, context)
        )
        costs = replace(costs, accumulates=config.accumulate > 1)
        # With layers that freeze, layouts are compared while training runs.
        if config.freeze is not None or program.num_pipelines > 1:
            costs = replace(costs, reduce_link=measure_ring(world) or Link())
        return costs

    depends_on = {
        "program": repr(program),
        "boundaries": str(boundaries),
        "settings": config.text,
        "updates": known.updates,
        "transport": type(context.transport).__name__,
        "freezes": str(config.freeze is not None),
    }
    costs = kept_costs(
        config.profile_dir, known.profile, known.code, depends_on, world, measure
    )
    if config.is_partial:
        trim_heap()  # of copies
    return CutModel(known, tuple(boundaries), modules, costs)


def hold_own(
    config: PipelineConfig,
    captured: Captured,
    modules: Sequence[StageModule],
    program: Program,
    context: WorkerContext,
) -> None:
    """Let each worker hold the weights of its own stages, where they are given.

    Every worker must call this.

    Args:
        config: the pipeline's.
        captured: the captured model.
        modules: all stages of the program.
        program: the stages' devices.
        context: this worker's context.

    Raises:
        SchemaError: two workers have other values of one tensor.
    """
    if not isinstance(config.weights, GivenWeights):
        return
    net = program.nets[-1].name
    own = nn.ModuleList(
        modules[number]
        for number in program.stages_on[context.layout.device]
        if program.stages[number].net == net
    )
    ids = {id(x) for x in (*own.parameters(), *own.buffers())}
    tensors = captured.state.tensors
    held = {name: x for name, x in tensors.items() if id(x) in ids}
    config.report("reading the weights of this worker's stages")
    gc.collect()
    trim_heap()  # of what was measured layer by layer
    config.hold(held)
    refuse_different_weights(context.world, held)


def messages_of(
    known: ProfiledModel, config: PipelineConfig, context: WorkerContext
) -> MessageCosts:
    """Return the costs of messages. Every worker must call this.

    They are kept beside the profile, so that the same profile always gives the same
    choice of an order.

    Args:
        known: the profiled model.
        config: the pipeline's.
        context: this worker's context.
    """
    if known.messages is not None:
        return known.messages
    world = context.world
    if world.world_size == 1:
        return MessageCosts(Link(), Link())

    def measure() -> Costs:
        config.report("measuring messages")
        return measure_messages(world, context.transport).costs()

    depends_on = {"transport": type(context.transport).__name__}
    costs = kept_costs(
        config.profile_dir, known.profile, known.code, depends_on, world, measure
    )
    return MessageCosts(costs.link, costs.handling)


def balanced_boundaries(
    known: ProfiledModel,
    program: Program,
    config: PipelineConfig,
    context: WorkerContext,
) -> tuple[int, ...]:
    """Return the layers at which stages 1, 2, ... of a model begin.

    Args:
        known: the profiled model.
        program: the number of stages, and their devices.
        config: the pipeline's; its `cut` names the modules with which they begin.
        context: this worker's context.

    Raises:
        ModelError: the model cannot be cut so.
    """
    num_stages, captured, cut_names = program.num_stages, known.captured, config.cut
    if cut_names is not None:
        boundaries = boundaries_from_names(captured, cut_names)
        if boundaries and num_stages == context.world.world_size == 1:
            warn("cut has no effect on one worker, which has one stage", stacklevel=2)
            return ()
        if len(cut_names) != num_stages - 1:
            raise ModelError(
                f"{len(cut_names)} cut points make {len(cut_names) + 1} stages, the "
                f"schedule has {num_stages}, on {program.num_devices} devices: name "
                f"{num_stages - 1} modules, or start a worker for each stage"
            )
        return boundaries
    if len(captured.layers) < num_stages:
        raise ModelError(
            f"the model has {len(captured.layers)} layers that it can be cut between, "
            f"too few for {num_stages} stages: use fewer devices, or fewer stages per "
            "device, or pad what is as long as the data say: only tensors whose shape "
            "depends on the number of samples alone can cross a cut"
        )
    layout = context.layout.every[0]
    ranks = [layout.ranks_of(stage.device) for stage in program.stages]
    return known.profile.balanced(num_stages, usual_cluster(context.world).hop, ranks)
