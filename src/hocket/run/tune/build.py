"""Makes a plan from a model and a batch: capture, profile, balance, schedule, predict.

Every worker takes the same path and ends with the same plan: what is measured is
averaged over the workers, which measure at the same time, and the plans are compared
before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.costs import Costs, Link
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import HocketError, ModelError
from hocket.freeze.greedy import greedy_boundaries
from hocket.model.capture.capture import Captured, capture
from hocket.model.capture.captured import enough_layers
from hocket.model.profile.costs import stage_costs
from hocket.model.profile.profile import Profile, conditions_of, path_of
from hocket.model.stages.cut import boundaries_from_names, cut, num_frozen_stages
from hocket.model.stages.stage import StageModule
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.recompute import recomputing
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import (
    Microbatch,
    call_arguments,
    count_samples,
    digest,
    split_batch,
)
from hocket.run.data.batch_output import BatchOutput
from hocket.run.data.loss import LossFunction
from hocket.run.device.memory import memory_bytes
from hocket.run.engine.lanes.play_plan import PlayPlan, plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.wiring import Wiring, wire, wire_one_net
from hocket.run.engine.plan import Plan, short_hash
from hocket.run.engine.programs.net_setup import NetSetup, example_output
from hocket.run.engine.programs.part_sizes import part_sizes
from hocket.run.engine.same_everywhere import (
    losses_of_random_outputs,
    refuse_differences,
    refuse_different_losses,
)
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.freezable import freezable_modules
from hocket.run.stage.net_output import NetOutput
from hocket.run.stage.precision import Precision
from hocket.run.tune.compile_stages import CompileConfig, compile_stages
from hocket.run.tune.config import PipelineConfig
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.link_costs import measure_messages, usual_cluster
from hocket.run.tune.profile_workers import profile_layers
from hocket.run.tune.teachers.stages import CutTeacher
from hocket.run.tune.trial_runs import measure_ring
from hocket.run.tune.update_costs import measure_updates
from hocket.run.weights.update_text import update_text


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A captured model and its profile, before there is an order.

    Args:
        captured: the captured model.
        profile: its layers' costs, the mean over the workers.
    """

    captured: Captured
    profile: Profile


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


def profile_model(
    config: PipelineConfig,
    world: World,
    num_stages: int = 0,
    teacher_outputs: Sequence[Any] = (),
) -> ProfiledModel:
    """Capture the model and profile it. Every worker must call this.

    Args:
        config: the pipeline's.
        world: all workers.
        num_stages: into how many stages it is to be cut; if 0, one per worker.
        teacher_outputs: the teachers' outputs of the first microbatch, which the loss
            reads.

    Raises:
        ModelError: the model cannot be captured.
        SchemaError: the workers have different models or settings.
    """
    microbatch = config.microbatches()[0]
    spec = pytree.tree_structure(call_arguments(config.example[0]))
    args, kwargs = pytree.tree_unflatten(microbatch.leaves, spec)
    captured = capture(config.model, args, kwargs, cut=_places_to_cut(config))
    if config.cut is None:
        captured = enough_layers(captured, num_stages or world.world_size)
    digests = {
        "settings": short_hash(config.text),
        "model": captured.digest,
        "weights": f"{digest(dict(captured.state.tensors)):08x}",
        "seed": str(config.seed),
        "updates": short_hash(_update_text(config, captured)),
        "compile": str(config.compile),
    }
    refuse_differences(world, digests)
    if world.world_size > 1:
        targets = microbatch.targets
        losses = losses_of_random_outputs(
            config.loss, captured, targets, teacher_outputs, world.device
        )
        refuse_different_losses(world, {"loss function": losses})
    measure = partial(
        profile_layers,
        captured,
        microbatch,
        partial(_loss_with, config.loss, tuple(teacher_outputs)),
        config.compute_precision,
        world,
    )
    return ProfiledModel(captured, load_or_measure(captured, config, world, measure))


def _places_to_cut(config: PipelineConfig) -> Sequence[str]:
    if config.freeze is None:
        return config.cut or ()
    return freezable_modules(config.model, config.freeze.layers)[1:]


def _loss_with(
    loss: LossFunction, teacher_outputs: Sequence[Any], output: Any, targets: Any
) -> Any:
    """Compute the loss of an output, with what it reads of teachers.

    Raises:
        ModelError: it fails with the outputs of teachers; gives all shapes.
    """
    try:
        return loss(output, targets, *teacher_outputs)
    except (HocketError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not teacher_outputs:
            raise
        shapes = ", ".join(map(_shapes, teacher_outputs))
        raise ModelError(
            f"the loss failed with {type(error).__name__}: {error}. The student's "
            f"output has shape {_shapes(output)}, and the teachers' outputs have "
            f"{shapes}: let the nets return outputs that the loss can compare, or "
            "convert them in the loss"
        ) from error


def _shapes(output: Any) -> str:
    output = output.own if isinstance(output, BatchOutput) else output
    shapes = pytree.tree_map_only(Tensor, lambda x: tuple(x.shape), output)
    return str(shapes)


def _update_text(config: PipelineConfig, captured: Captured) -> str:
    tensors = captured.state.tensors.items()
    trained = {name: x for name, x in tensors if x.requires_grad}
    return update_text(config, trained)


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
    if world.device.type != "cpu":
        config.model.cpu()  # each worker moves its own stages to its device
    if boundaries is None and config.balance == "greedy" and config.cut is None:
        sizes = known.captured.parameters_in_millions
        boundaries = greedy_boundaries(sizes, program.num_stages)
    elif boundaries is None:
        boundaries = balanced_boundaries(
            known, program, config.cut, world, context.layout
        )
    modules = cut(known.captured, boundaries, program.flows)
    messages = measure_messages(world, context.transport)
    costs = stage_costs(
        known.profile,
        boundaries,
        modules,
        link=messages.link,
        handling=messages.handling,
        updates=measure_updates(modules, program, config, context),
    )
    costs = replace(costs, accumulates=config.accumulate > 1)
    if config.freeze is not None:  # other layouts are compared while training runs
        costs = replace(costs, reduce_link=measure_ring(world) or Link())
    return CutModel(known, tuple(boundaries), modules, costs)


def build_plan(
    config: PipelineConfig,
    order: Schedule,
    context: WorkerContext,
    known: ProfiledModel | CutModel | None,
) -> tuple[Plan, PlayPlan, tuple[NetSetup, ...], PointToPoint, Wiring, Captured]:
    """Decide everything that can be decided before the first step.

    Every worker must call this.

    Args:
        config: the pipeline's.
        order: one step; or several that overlap, with a repeating body.
        context: this worker's context.
        known: what was measured already to choose or make the order.

    Returns:
        The plan, its schedule planned op by op, all nets with their stages, this
        worker's messages, which values go along each flow, and the captured model.

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
    if not found.teachers:  # with some, it is frozen before they are added
        order = freeze_stages(order, num_frozen_stages(modules))
    costs = _recomputing(found.costs, order, config, world)
    if config.compile:
        compile_stages([*_to_compile(config, order, found, world)], order, context)
    play_plan = plan_to_play(order, clips=config.clip_norm is not None)
    channels = context.channels(play_plan)
    nets, wiring = _nets(config, order.program, found)
    program = order.program
    if not config.whole_batch and not program.whole_batch_flows:
        costs = dry_run(
            costs,
            [captured, *(teacher.known.captured for teacher in found.teachers)],
            order,
            nets,
            wiring,
            _parts(config, program),
            config.training,
            context,
            channels,
        )
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
            *(tuple(module.state_dict()) for module in own),
        ),
        captured.example,
        "" if isinstance(config.schedule, Schedule) else str(config.schedule),
        order,
        found.known.profile,
        costs,
        simulate(order, costs),
    )
    refuse_differences(world, {"plan": plan.digest})
    return plan, play_plan, nets, channels, wiring, captured


def _parts(
    config: PipelineConfig, program: Program
) -> Mapping[str, Sequence[Microbatch]]:
    """Return each net's microbatches of the example, in the first replica."""
    if len(program.nets) == 1:
        return {program.nets[0].name: config.microbatches()[:1]}
    sizes_of = part_sizes(program)
    found = {}
    for net in program.nets:
        num_parts = net.num_microbatches * program.num_replicas
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
        num_parts = known.num_microbatches * config.num_replicas
        parts = split_batch(example, num_parts, sizes_of=sizes_of[known.name])
        training = known.teacher.is_training
        yield (
            CompileConfig(
                teacher.modules, None, device, precision, first, training=training
            ),
            parts,
        )
        first += len(teacher.modules)
    read = (
        teacher.known.output_for_loss(
            microbatches[0], count_samples(example), over_batch=config.whole_batch
        )
        for teacher in found.teachers
    )
    own, loss = found.modules[first:], config.loss
    work = CompileConfig(own, loss, device, precision, first, read=tuple(read))
    yield work, microbatches


def _nets(
    config: PipelineConfig, program: Program, found: CutModel
) -> tuple[tuple[NetSetup, ...], Wiring]:
    """Return all nets as workers are set up from them, and what goes between them."""
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
        [name for name, _ in config.model.named_parameters()],
        config.loss,
        config.training,
        others={last: read} if read else {},
        output=output,
    )
    nets = (*(teacher.setup for teacher in found.teachers), student)
    if not found.teachers:
        return nets, wire_one_net(program, found.modules, output)
    outputs = forms if output is None else {**forms, name: output}
    return nets, wire(program, found.modules, outputs)


def _recomputing(
    costs: Costs, order: Schedule, config: PipelineConfig, world: World
) -> Costs:
    most = config.memory_bytes
    if config.recompute == "auto" and most is None:
        most = memory_bytes(world)
    return recomputing(config.recompute, order, costs, most)


def load_or_measure(
    captured: Captured,
    config: PipelineConfig,
    world: World,
    measure: Callable[[], Profile],
    *,
    passes: str = "",
) -> Profile:
    """Load a profile on rank 0, or measure it on all workers. Every worker must call.

    Args:
        captured: the captured model.
        config: the pipeline's, with the folder of kept profiles.
        world: all workers.
        measure: measures on all workers, and returns the mean.
        passes: which passes are measured, where they are not forward and backward.
    """
    conditions = conditions_of(captured, world.device)
    if passes:
        conditions["passes"] = passes
    precision = config.compute_precision
    folder = None if config.profile_dir is None else Path(config.profile_dir)
    if folder is not None and precision is not Precision.FLOAT32:
        folder = folder / precision.value
    path = None if folder is None else path_of(folder, conditions)
    kinds = world.gather_json(conditions["device_name"], "kind of device")
    if len({*map(str, kinds)}) > 1:
        path = None  # kept profiles are of one kind
    found = None
    if world.rank == 0 and path is not None and path.exists():
        kept = Profile.load(path)
        kept.check_layers([layer.name for layer in captured.layers], path)
        found = kept.to_json()
    found = world.broadcast_json(found, name="profile found")
    if found is not None:
        return Profile.from_json(found)

    mean = measure()
    if world.rank == 0 and path is not None:
        mean.save(path)
    return mean


def balanced_boundaries(
    known: ProfiledModel,
    program: Program,
    cut_names: Sequence[str] | None,
    world: World,
    layout: Layout,
) -> tuple[int, ...]:
    """Return the layers at which stages 1, 2, ... of a model begin.

    Args:
        known: the profiled model.
        program: the number of stages, and their devices.
        cut_names: the modules with which they begin; balanced when not given.
        world: all workers.
        layout: the ranks by device and replica.

    Raises:
        ModelError: the model cannot be cut so.
    """
    num_stages, captured = program.num_stages, known.captured
    if cut_names is not None:
        if len(cut_names) != num_stages - 1:
            raise ModelError(
                f"{len(cut_names)} cut points make {len(cut_names) + 1} stages, the "
                f"schedule has {num_stages}: name {num_stages - 1} modules"
            )
        return boundaries_from_names(captured, cut_names)
    if len(captured.layers) < num_stages:
        raise ModelError(
            f"the model has {len(captured.layers)} layers that it can be cut between, "
            f"too few for {num_stages} stages: use fewer devices, or fewer stages per "
            "device, or pad what is as long as the data say: only tensors whose shape "
            "depends on the number of samples alone can cross a cut"
        )
    ranks = [layout.replicas_of(stage.device) for stage in program.stages]
    return known.profile.balanced(num_stages, usual_cluster(world).hop, ranks)
