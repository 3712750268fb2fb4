"""Makes a plan from a model and a batch: capture, profile, balance, schedule, predict.

Every worker takes the same path and ends with the same plan: what is measured is
averaged over the workers, which measure at the same time, and the plans are compared
before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import ModelError
from hocket.model.capture.capture import Captured, capture
from hocket.model.profile.costs import stage_costs
from hocket.model.profile.measure import profile
from hocket.model.profile.profile import Profile, conditions_of, mean_profile, path_of
from hocket.model.stages.cut import boundaries_from_names, cut, num_frozen_stages
from hocket.model.stages.stage import StageModule
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.balance import balance
from hocket.planner.recompute import RecomputeName, recomputing
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch, digest
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.device.memory import memory_bytes
from hocket.run.engine.lanes.play_plan import PlayPlan, plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.plan import Plan, short_hash
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.precision import Precision
from hocket.run.stage.split.by_layers import ByLayers
from hocket.run.tune.compile_stages import CompileConfig, compile_stages
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.link_costs import measure_messages
from hocket.run.tune.update_costs import measure_updates
from hocket.run.weights.settings import TrainingConfig
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
    """

    known: ProfiledModel
    boundaries: tuple[int, ...]
    modules: tuple[StageModule, ...]
    costs: Costs


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What a plan is made from: the user's model and choices.

    Args:
        model: the uncut model.
        loss: as for the pipeline.
        settings: the training settings.
        example: one microbatch.
        spec: puts the example's leaves back into `(args, kwargs)`.
        cut_names: the modules with which stages 1, 2, ... begin.
        profile_dir: the folder in which profiles are kept and found again.
        recompute: which stages recompute.
        memory_bytes: the memory for tensors on each device; None for most of what it
            has.
        seed: the seed of random numbers in the forward.
        max_delay: by how many updates weights may be stale if the order is chosen here.
        compiled_for: microbatches of the sizes that stages are compiled for; none if
            they are not.
        known: the profiled model, if it was profiled already.
        cut_model: its stages, if they were cut already.
    """

    model: nn.Module
    loss: LossFunction
    settings: TrainingConfig
    example: Microbatch
    spec: pytree.TreeSpec
    cut_names: Sequence[str] | None
    profile_dir: Path | None
    recompute: RecomputeName = "none"
    memory_bytes: int | None = None
    seed: int = 0
    max_delay: int = 0
    compiled_for: tuple[Microbatch, ...] = ()
    known: ProfiledModel | None = None
    cut_model: CutModel | None = None


def profile_model(config: PlanConfig, world: World) -> ProfiledModel:
    """Capture the model and profile it. Every worker must call this.

    Raises:
        ModelError: the model cannot be captured.
        SchemaError: the workers have different models or settings.
    """
    args, kwargs = pytree.tree_unflatten(config.example.leaves, config.spec)
    captured = capture(config.model, args, kwargs, cut=config.cut_names or ())
    digests = {
        "settings": short_hash(config.settings.text),
        "model": captured.digest,
        "weights": f"{digest(dict(captured.state.tensors)):08x}",
        "seed": str(config.seed),
        "updates": short_hash(_update_text(config, captured)),
        "compile": str(bool(config.compiled_for)),
    }
    refuse_differences(world, digests)
    return ProfiledModel(captured, _profile(captured, config, world))


def _update_text(config: PlanConfig, captured: Captured) -> str:
    tensors = captured.state.tensors.items()
    trained = {name: x for name, x in tensors if x.requires_grad}
    return update_text(config.settings, trained)


def cut_and_measure(
    config: PlanConfig, program: Program, context: WorkerContext
) -> CutModel:
    """Cut the model and measure what its profile lacks. Every worker must call this.

    Args:
        config: the user's choices.
        program: the number of stages, and their devices.
        context: this worker's context.

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        SchemaError: the workers have different models or settings.
    """
    world = context.world
    known = profile_model(config, world) if config.known is None else config.known
    if world.device.type != "cpu":
        config.model.cpu()  # each worker moves its own stages to its device
    boundaries = _boundaries(known, program, config.cut_names)
    modules = cut(known.captured, boundaries, program.flows)
    messages = measure_messages(world, context.transport)
    costs = stage_costs(
        known.profile,
        boundaries,
        modules,
        link=messages.link,
        handling=messages.handling,
        updates=measure_updates(modules, program, config.settings, context),
    )
    costs = replace(costs, accumulates=config.settings.accumulate > 1)
    return CutModel(known, boundaries, modules, costs)


def build_plan(
    config: PlanConfig,
    schedule_name: str,
    order: Schedule,
    context: WorkerContext,
) -> tuple[Plan, PlayPlan, tuple[StageModule, ...], PointToPoint]:
    """Decide everything that can be decided before the first step.

    Every worker must call this.

    Returns:
        The plan, its schedule planned op by op, all stages, and this worker's messages.

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        SchemaError: the workers came to different plans.
    """
    world = context.world
    refuse_differences(world, {"schedule": short_hash(str(order))})
    found = config.cut_model or cut_and_measure(config, order.program, context)
    captured, modules = found.known.captured, found.modules
    order = freeze_stages(order, num_frozen_stages(modules))
    costs = _recomputing(found.costs, order, config, world)
    if config.compiled_for:
        work = CompileConfig(
            modules, config.loss, world.device, config.settings.precision
        )
        compile_stages(work, order, config.compiled_for, context)
    play_plan = plan_to_play(order, clips=config.settings.clip_norm is not None)
    channels = context.channels(play_plan)
    if world.device.type == "cpu":
        costs = dry_run(
            costs,
            captured,
            order,
            modules,
            config.loss,
            config.example,
            context,
            channels,
            config.settings.precision,
        )
    plan = Plan(
        found.boundaries,
        tuple(captured.layers[i].name for i in (0, *found.boundaries)),
        tuple(tuple(module.state_dict()) for module in modules),
        captured.example,
        schedule_name,
        order,
        found.known.profile,
        costs,
        simulate(order, costs),
    )
    refuse_differences(world, {"plan": plan.digest})
    return plan, play_plan, modules, channels


def _recomputing(
    costs: Costs, order: Schedule, config: PlanConfig, world: World
) -> Costs:
    most = config.memory_bytes
    if config.recompute == "auto" and most is None:
        most = memory_bytes(world)
    return recomputing(config.recompute, order, costs, most)


def _profile(captured: Captured, config: PlanConfig, world: World) -> Profile:
    """Load the profile on rank 0, or measure it on all workers and take the mean."""
    conditions = conditions_of(captured, world.device)
    precision = config.settings.precision
    folder = config.profile_dir
    if folder is not None and precision is not Precision.FLOAT32:
        folder = folder / precision.value
    path = None if folder is None else path_of(folder, conditions)
    found = None
    if world.rank == 0 and path is not None and path.exists():
        found = Profile.load(path).to_json()
    found = world.broadcast_json(found, name="profile found")
    if found is not None:
        return Profile.from_json(found)

    def finish(output: object) -> Tensor:
        return losses_of(config.loss, output, config.example.targets)[TOTAL]

    world.barrier("profile")
    with precision.autocast(world.device):
        own = profile(
            captured,
            config.example.leaves,
            device=world.device,
            make_splitter=ByLayers,
            finish=finish,
            targets=config.example.targets,
        )
    parts = world.gather_json(own.to_json(), "profile measured")
    mean = mean_profile([Profile.from_json(part) for part in parts])
    if world.rank == 0 and path is not None:
        mean.save(path)
    return mean


def _boundaries(
    known: ProfiledModel, program: Program, cut_names: Sequence[str] | None
) -> tuple[int, ...]:
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
            "device"
        )
    return balance(known.profile.layer_s, num_stages)
