"""From a model and a batch to a plan: capture, profile, balance, schedule, predict.

Every worker takes the same path and ends with the same plan: what is measured is
averaged over the workers, who measure at the same time (as they will compute at the
same time), and the plans are compared before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import ModelError, SchemaError
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
from hocket.run.engine.plan import Plan, short_hash
from hocket.run.engine.play_plan import PlayPlan, plan_to_play
from hocket.run.engine.point_to_point import PointToPoint
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.precision import Precision
from hocket.run.stage.split.by_layers import ByLayers
from hocket.run.tune.compile_stages import CompileConfig, compile_stages
from hocket.run.tune.dry_run import dry_run
from hocket.run.tune.link_costs import measure_messages
from hocket.run.tune.update_costs import measure_updates
from hocket.run.weights.settings import TrainingSettings
from hocket.run.weights.update_text import update_text


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """What is known of a model before there is an order.

    Args:
        captured: its work.
        profile: what that costs, the mean over the workers.
    """

    captured: Captured
    profile: Profile


@dataclass(frozen=True, slots=True)
class CutModel:
    """What is known of a model in stages before there is an order.

    Args:
        known: of the model.
        boundaries: the layers at which stages 1, 2, ... begin.
        modules: all stages.
        costs: as added up from single layers, and of messages; no stage recomputes.
    """

    known: ProfiledModel
    boundaries: tuple[int, ...]
    modules: tuple[StageModule, ...]
    costs: Costs


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the user asked for.

    Args:
        model: uncut.
        loss: as for the pipeline.
        settings: how to train.
        example: one microbatch.
        spec: puts the example's leaves back into `(args, kwargs)`.
        cut_names: the modules with which stages 1, 2, ... begin.
        profile_dir: where profiles are kept and found again.
        recompute: which stages recompute.
        memory_bytes: that tensors may take on a device; None for most of what it has.
        seed: for random numbers in the forward.
        max_delay: by how many updates weights may be old where the order is chosen.
        compiled_for: microbatches of the sizes that stages are compiled for; none where
            they run as they are.
        known: of the model, where that was studied already.
        cut_model: of its stages, where they were cut already.
    """

    model: nn.Module
    loss: LossFunction
    settings: TrainingSettings
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
    _compare(
        world,
        settings=short_hash(config.settings.text),
        model=captured.digest,
        weights=f"{digest(dict(captured.state.tensors)):08x}",
        seed=str(config.seed),
        updates=short_hash(_update_text(config, captured)),
        compile=str(bool(config.compiled_for)),
    )
    return ProfiledModel(captured, _profile(captured, config, world))


def _update_text(config: PlanConfig, captured: Captured) -> str:
    tensors = captured.state.tensors.items()
    trained = {name: x for name, x in tensors if x.requires_grad}
    return update_text(config.settings, trained)


def cut_and_measure(
    config: PlanConfig, program: Program, context: WorkerContext
) -> CutModel:
    """Cut the model, and measure what is not in its profile. Every worker must call.

    Args:
        config: what the user asked for.
        program: how many stages there are, and on which devices.
        context: this worker's.

    Raises:
        ModelError: the model cannot be captured or cut as asked.
        SchemaError: the workers have different models or settings.
    """
    world = context.world
    known = profile_model(config, world) if config.known is None else config.known
    if world.device.type != "cpu":
        config.model.cpu()  # given there; each worker will take back its stages
    boundaries = _boundaries(known, program, config.cut_names)
    modules = cut(known.captured, boundaries)
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
    _compare(world, schedule=short_hash(str(order)))
    found = config.cut_model or cut_and_measure(config, order.program, context)
    captured, modules = found.known.captured, found.modules
    order = freeze_stages(order, num_frozen_stages(modules))
    costs = _recomputing(found.costs, order, config, world)
    if config.compiled_for:
        work = CompileConfig(
            modules, config.loss, world.device, config.settings.precision
        )
        compile_stages(work, order, config.compiled_for, context)
    play_plan = plan_to_play(order)
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
    _compare(world, plan=plan.digest)
    return plan, play_plan, modules, channels


def _recomputing(
    costs: Costs, order: Schedule, config: PlanConfig, world: World
) -> Costs:
    most = config.memory_bytes
    if config.recompute == "auto" and most is None:
        most = memory_bytes(world)
    return recomputing(config.recompute, order, costs, most)


def _profile(captured: Captured, config: PlanConfig, world: World) -> Profile:
    """Found again by rank 0, or measured on all workers at once, and then the mean."""
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


def _compare(world: World, **digests: str) -> None:
    """Refuse to start workers that are not about to do the same.

    Raises:
        SchemaError: two workers differ; names both, and in what.
    """
    told = world.gather_json(dict(digests), "compare")
    for what in digests:
        first, *others = [part[what] for part in told if isinstance(part, dict)]
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise SchemaError(
                    f"ranks 0 and {rank} differ in the {what} (digests "
                    f"{str(first)[:8]} and {str(other)[:8]}): make the pipeline from "
                    f"the same model, example and settings on every worker. {_REMEDY}"
                )


_REMEDY: Final = (
    "Weights are the same where every worker seeds before it makes the model, or loads "
    "the same checkpoint"
)
