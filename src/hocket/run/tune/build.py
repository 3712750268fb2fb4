"""Makes a plan from a model and a batch: capture, profile, balance, schedule, predict.

Every worker takes the same path and ends with the same plan: what is measured is
averaged over the workers, which measure at the same time, and the plans are compared
before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.formats import costs_json
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import FitError
from hocket.model.stages.cut import num_frozen_stages
from hocket.model.stages.saved_modules import refuse_kept
from hocket.model.trace.state import saved_tensors
from hocket.passes.add_gathers import Keeps, add_gathers
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.gathers import choose_gathers, with_copies, with_shards
from hocket.planner.recompute import recomputing
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import (
    Microbatch,
    count_samples,
    split_batch,
)
from hocket.run.engine.lanes.play_plan import PlayPlan, plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.plan import Plan, short_hash
from hocket.run.engine.programs.net_setup import NetSetup, example_output
from hocket.run.engine.programs.part_sizes import part_sizes
from hocket.run.engine.same_everywhere import refuse_differences, refuse_reads
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.followed import FollowedNet
from hocket.run.stage.loss_checks.reads import LossReads, ModelTensors, PlayedStage
from hocket.run.stage.net_output import NetOutput
from hocket.run.tune.compile_stages import CompileConfig, compile_stages
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.cut.cut_model import CutModel, cut_and_measure, hold_own
from hocket.run.tune.cut.kept import kept_costs
from hocket.run.tune.cut.profiled_model import ProfiledModel
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.order import with_given_gathers


def build_plan(
    config: PipelineConfig,
    order: Schedule,
    context: WorkerContext,
    known: ProfiledModel | CutModel | None,
) -> tuple[Plan, PlayPlan, tuple[NetSetup, ...], PointToPoint, CutModel]:
    """Decide everything that can be decided before the first step.

    Every worker must call this.

    Args:
        config: the pipeline's.
        order: one step; or several that overlap, with a repeating body.
        context: this worker's context.
        known: what was measured already to choose or make the order.

    Returns:
        The plan, its schedule planned op by op, all nets with their stages, this
        worker's messages, and what was cut.

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        SchemaError: the workers came to different plans.
    """
    world = context.world
    refuse_differences(world, {"schedule": short_hash(str(order))})
    if isinstance(known, CutModel):
        found = known
    else:
        found = cut_and_measure(config, order.program, context, known)
    captured, modules = found.known.captured, found.modules
    if found is known:  # others may have been tried behind it
        hold_own(config, captured, modules, order.program, context)
    if not found.teachers:  # with some, it is frozen before they are added
        order = freeze_stages(order, num_frozen_stages(modules))
    _refuse_reads(config, order.program, found, world)
    refuse_kept(captured, modules)
    most = config.memory_of(world) if config.recompute == "auto" else None
    costs = recomputing(config.recompute, order, found.costs, most)
    if config.compile:
        config.report("compiling the stages")
        compile_stages([*_to_compile(config, order, found, world)], order, context)
    play_plan = plan_to_play(order, clips=config.clip_norm is not None)
    channels = PointToPoint(play_plan, context)
    nets = _nets(config, order.program, found)
    program = order.program
    can_run = captured.state.trained and not config.whole_batch
    if can_run and not program.whole_batch_flows:

        def in_place() -> Costs:
            config.report("a dry run of a few steps")
            return dry_run(
                costs,
                [captured, *(teacher.known.captured for teacher in found.teachers)],
                order,
                nets,
                _parts(config, program),
                channels,
            )

        depends_on = {
            "costs": costs_json.to_json(costs),
            "order": str(order),
            "compile": str(config.compile),
        }
        folder = None if found.teachers else config.profile_dir
        known = found.known
        costs = kept_costs(
            folder, known.profile, known.code, depends_on, world, in_place
        )
    if context.layout.num_shards > 1:
        order, costs = sharded(order, costs, context.layout, config, world)
        play_plan = plan_to_play(order, clips=config.clip_norm is not None)
    begins = (0, *found.boundaries)
    own = modules[len(modules) - len(begins) :]
    plan = Plan(
        found.boundaries,
        (
            *(name for teacher in found.teachers for name in teacher.stage_names),
            *(captured.layers[begin].name for begin in begins),
        ),
        (
            *(names for teacher in found.teachers for names in teacher.state_names),
            *(tuple(saved_tensors(module)) for module in own),
        ),
        replace(captured.example, any_form=config.freeze is None),
        "" if isinstance(config.schedule, Schedule) else str(config.schedule),
        order,
        found.known.profile,
        costs,
        simulate(order, costs, play_plan.gates),
        found.known.frozen_s,
    )
    refuse_differences(world, {"plan": plan.digest})
    return plan, play_plan, nets, channels, found


def sharded(
    order: Schedule, costs: Costs, layout: Layout, config: PipelineConfig, world: World
) -> tuple[Schedule, Costs]:
    """Return an order of replicas as one whose stages are sharded, and its costs.

    A given order keeps the gathers that its user wrote.

    Every worker must call this.

    Args:
        order: an order of as many replicas as there are pipelines.
        costs: those of its stages, whole.
        layout: says how many replicas and shards there are.
        config: has the memory that stages may take while they are whole.
        world: the job.

    Raises:
        FitError: `memory_bytes` was given, and a device needs more.
    """
    replicas, shards = layout.num_replicas, layout.num_shards
    bare = with_copies(order, replicas, shards)
    costs = with_shards(costs, bare.program)
    given = with_given_gathers(bare, config, layout)
    if given is not None:
        return given, costs
    keeps: Keeps = "op"
    try:
        keeps = choose_gathers(bare, costs, config.memory_of(world))
    except FitError:
        if config.memory_bytes is not None:
            raise
    found = add_gathers(bare, keeps)
    check(found)
    return found, costs


def followed_nets(found: CutModel) -> tuple[FollowedNet, ...]:
    """Return what lets the stages of all nets follow changes of the users' models."""
    first = sum(len(x.modules) for x in found.teachers)
    known = found.known.captured
    cuts = [
        (x.known.captured, x.places.boundaries, x.modules, x.known.teacher.is_training)
        for x in found.teachers
    ] + [(known, found.boundaries, found.modules[first:], True)]
    nets, first = [], 0
    for captured, boundaries, modules, trains in cuts:
        flows = [(source, x.index) for x in modules for source in x.received]
        numbers = range(first, first + len(modules))
        nets.append(FollowedNet(captured, boundaries, flows, numbers, trains=trains))
        first = numbers.stop
    return tuple(nets)


def _parts(
    config: PipelineConfig, program: Program
) -> Mapping[str, Sequence[Microbatch]]:
    """Return each net's microbatches of the example, in the first replica."""
    if len(program.nets) == 1:
        return {program.nets[0].name: config.microbatches()[:1]}
    sizes_of = part_sizes(program)
    found = {}
    for net in program.nets:
        num_parts = net.num_microbatches * program.num_pipelines
        parts = split_batch(config.example, num_parts, sizes_of=sizes_of[net.name])
        found[net.name] = parts[: net.num_microbatches]
    return found


def _to_compile(
    config: PipelineConfig, order: Schedule, found: CutModel, world: World
) -> Iterator[tuple[CompileConfig, Sequence[Microbatch]]]:
    """Yield each net with the microbatches whose sizes its stages are compiled for."""
    sizes_of = part_sizes(order.program)
    microbatches, example = config.microbatches(), config.example
    device, precision = world.device, config.compute_precision
    first = 0
    for teacher in found.teachers:
        known = teacher.known
        num_parts = known.num_microbatches * config.num_pipelines
        parts = split_batch(example, num_parts, sizes_of=sizes_of[known.name])
        training = known.teacher.is_training
        yield (
            CompileConfig(
                teacher.modules, None, device, precision, first, training=training
            ),
            parts,
        )
        first += len(teacher.modules)
    own, loss = found.modules[first:], config.loss
    read = _read_of_teachers(config, found)
    work = CompileConfig(own, loss, device, precision, first, read=read)
    yield work, microbatches


def _read_of_teachers(config: PipelineConfig, found: CutModel) -> tuple[Any, ...]:
    """Return what the loss of the first microbatch reads of the teachers."""
    size, first = count_samples(config.example), config.microbatches()[0]
    return tuple(
        teacher.known.output_for_loss(first, size, over_batch=config.whole_batch)
        for teacher in found.teachers
    )


def _refuse_reads(
    config: PipelineConfig, program: Program, found: CutModel, world: World
) -> None:
    """Refuse a loss that reads weights of other workers' stages, on all workers.

    It is tried on random outputs; the first step looks again, on the last worker.

    Raises:
        ModelError: it does.
    """
    last = program.stages[-1]
    pairs = zip(program.stages, found.modules, strict=True)
    here = [
        PlayedStage(module, stage.delay if stage.trainable else 0)
        for stage, module in pairs
        if (stage.net, stage.device) == (last.net, last.device)
    ]
    reads = LossReads(config.loss, ModelTensors(config.model), lambda: here)
    read = _read_of_teachers(config, found)
    captured, targets = found.known.captured, config.microbatches()[0].targets
    refuse_reads(reads, config.loss, captured, targets, read, world.device)


def _nets(
    config: PipelineConfig, program: Program, found: CutModel
) -> tuple[NetSetup, ...]:
    """Return all nets as workers are set up from them."""
    name = program.nets[-1].name
    forms = {teacher.name: teacher.form for teacher in found.teachers}
    whole = {program.stages[source].net for source, _ in program.whole_batch_flows}
    read = tuple(replace(form, is_whole=net in whole) for net, form in forms.items())
    output = None
    if config.whole_batch:
        output = NetOutput.of(example_output(found.known.captured, training=True), name)
    num_own = len(found.boundaries) + 1
    last = program.num_stages - 1
    student = NetSetup(
        name,
        found.modules[len(found.modules) - num_own :],
        found.known.captured.state.parameter_names,
        config.loss,
        config.training,
        others={last: read} if read else {},
        output=output,
        tensors=ModelTensors(config.model),
    )
    return (*(teacher.setup for teacher in found.teachers), student)
