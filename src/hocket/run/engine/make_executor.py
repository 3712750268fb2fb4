"""Put together everything that one worker needs to play its lanes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from hocket.core.dataflow import Fact
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ModelError
from hocket.model.stages.cut import StageModule, shared_parameters
from hocket.passes.one_step import one_step
from hocket.run.cluster.group import WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.play_plan import PlayPlan
from hocket.run.engine.lanes.player import OnError
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.ports import OP_G
from hocket.run.engine.lanes.stage_table import StageTable
from hocket.run.engine.lanes.wiring import wire
from hocket.run.engine.make_runners import make_runners
from hocket.run.engine.programs.batch_loss import BatchLoss, Gather, LossInput
from hocket.run.engine.programs.net_setup import (
    NetSetup,
    ParameterNames,
    modules_of,
    stages_of,
    training_of,
)
from hocket.run.engine.refusals import (
    input_reads,
    refuse_beside_masters,
    refuse_early_reads,
    refuse_hooks,
    refuse_shared,
)
from hocket.run.engine.sync.make import SyncMaker, first_stages
from hocket.run.engine.sync.results import Results
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.follower import Follower, follow
from hocket.run.weights.kept_optimizer import make_kept_optimizer
from hocket.run.weights.masters import Masters
from hocket.run.weights.reduce import GradientSum, Reducer
from hocket.run.weights.settings import Parameters
from hocket.run.weights.sharded.shards import Shards, make_shards
from hocket.run.weights.stale_ties.make import attach_versions
from hocket.run.weights.stale_ties.stale_tie import find_stale_ties
from hocket.run.weights.step_check import refuse_joint_steps, refuse_shard_steps
from hocket.run.weights.tied_weights import (
    equal_start,
    find_ties,
    owned_parameters,
    tie_groups,
    tie_reducers,
)
from hocket.run.weights.updater import Updater, refuse_modes


def make_executor(
    play_plan: PlayPlan,
    nets: Sequence[NetSetup],
    channels: PointToPoint,
    *,
    seed: int,
    recomputes: Collection[int] = (),
    on_error: OnError | None = None,
    is_cut_again: bool = False,
) -> Executor:
    """Make this worker's executor. Every worker must do so at the same time.

    Args:
        play_plan: the schedule, planned op by op.
        nets: all nets of its program.
        channels: this worker's messages.
        seed: for random numbers in the forward.
        recomputes: the stages that run their forward again in the backward.
        on_error: called when an op has failed.
        is_cut_again: whether the nets were trained in another layout: all workers hold
            the same weights, and the optimizer goes together with any cut.

    Raises:
        ConfigError: an optimizer looks at the parameters of several stages at once.
        ModelError: the weights' types do not go with the precision asked for; or a
            shared weight is updated at two times, or in a program of several nets.
    """
    program, context = play_plan.program, channels.context
    settings, wiring = training_of(nets), wire(program, nets)
    schedule, layout = play_plan.schedule, context.layout
    modules = modules_of(program, nets)
    settings.compute_precision.check_types(modules)
    by_net = {net.name: net for net in nets}
    for net in nets:
        if net.settings is not None and not is_cut_again:
            numbers = stages_of(program, net.name)
            parts = {
                f"stage {number}": dict(module.named_parameters())
                for number, module in zip(numbers, net.modules, strict=True)
            }
            refuse_joint_steps(net.settings, parts)
    runners = make_runners(
        program, nets, context, wiring, seed=seed, recomputes=recomputes
    )
    replicas = context.with_replicas()
    groups_of = _ReductionGroups(schedule, context, replicas)
    shared = _shared(nets, schedule)
    is_stale = any(x.trainable and x.delay for x in program.stages)
    stale_ties = (
        find_stale_ties(_trained(shared, modules), schedule) if is_stale else []
    )
    if schedule.body:
        refuse_shared(stale_ties, schedule)
        refuse_early_reads(_trained(shared, modules), schedule)
    refuse_hooks(program, dict(enumerate(modules)))  # alike on all workers
    ties = find_ties(shared, schedule)
    groups = tie_groups(ties, layout, context.groups)
    trained = {
        stage: runner
        for stage, runner in runners.items()
        if by_net[program.stages[stage].net].settings is not None
    }
    if not is_cut_again:
        equal_start(runners, trained, layout, replicas, ties, groups)
    owned = owned_parameters(trained, one_step(schedule), layout.device, stale_ties)
    how = {stage: by_net[program.stages[stage].net] for stage in owned}
    masters = settings.compute_precision.has_masters
    if masters:
        refuse_beside_masters(stale_ties, [x.name for x in nets if x.follows])
    keeps_others = masters or program.num_shards > 1
    firsts = _optimizers_of_whole(owned if keeps_others else {}, how)
    shards = None
    if program.num_shards > 1:
        named = {number: runner.parameters for number, runner in runners.items()}
        shards = make_shards(
            named,
            layout,
            context.world,
            replicas,
            context.recorder.wait,
            masters=masters,
        )
    sums = {stage: groups_of.reduces(stage) for stage in owned}
    updaters, updated = _updaters(owned, how, sums, shards, firsts, masters=masters)
    if is_stale:
        why = "old weights are kept of the first alone: take a schedule without delays"
        refuse_modes(updaters, why)
    stale_names = {tie.name for tie in stale_ties}
    # These are equal by now.
    ties = [tie for tie in ties if tie.name not in stale_names]
    names = ParameterNames(program, nets)
    maker = SyncMaker(
        play_plan,
        modules,
        settings,
        context,
        updaters,
        names,
        first_stages(program, nets, names),
        ties,
        {
            stage: tie_reducers(ties, groups, {stage: own})
            for stage, own in updated.items()
        },
        settings.compute_precision.make_scale(context.world.device),
    )
    worker_ties = attach_versions(
        runners, program, stale_ties, layout, context.transport
    )
    losses = {net.name: stages_of(program, net.name)[-1] for net in nets if net.loss}
    results = {
        net: Results(net, program.stages[last].device, groups_of.losses(), context)
        for net, last in losses.items()
    }
    ends = {last: net for net, last in losses.items() if last in runners}
    sync = maker.make(runners, ends, results, replicas)
    table = StageTable(
        play_plan,
        runners,
        updaters,
        channels,
        sync,
        worker_ties,
        wiring=wiring,
        followers=_followers(schedule, by_net, runners, shards),
        shards=shards,
    )
    add_batch_losses(table, program, by_net, runners, layout, groups_of)
    return Executor(
        play_plan,
        runners,
        updaters,
        maker.scale,
        context,
        table.player(on_error),
        sync,
        worker_ties,
        wiring,
        replicas,
        input_reads(program, modules),
        shards=shards,
    )


def _updaters(
    owned: Mapping[int, Mapping[str, nn.Parameter]],
    nets: Mapping[int, NetSetup],
    groups: Mapping[int, WorkerGroup | None],
    shards: Shards | None,
    firsts: Mapping[int, torch.optim.Optimizer],
    *,
    masters: bool,
) -> tuple[dict[int, Updater], dict[int, Mapping[str, nn.Parameter]]]:
    """Return the updaters of this worker's stages, and what each of them updates.

    Args:
        owned: the parameters that each stage updates.
        nets: the net of each stage.
        groups: the workers that add up the gradients of each stage.
        shards: the weights, where they are sharded.
        firsts: the optimizers that were made of the model's parameters, where others
            are kept.
        masters: whether those of bfloat16 have masters.
    """
    updaters: dict[int, Updater] = {}
    updated: dict[int, Mapping[str, nn.Parameter]] = {}
    for stage, own in owned.items():
        settings, whole = nets[stage].settings, nets[stage].parameters
        assert settings is not None
        group, what = groups[stage], f"gradients of stage {stage}"
        own_masters = Masters(own.values() if masters and shards is None else ())
        kept = own_masters.by_weight if shards is None else shards.by_weight
        mine, made, models = dict(own), None, None
        if kept:
            models = whole
            mine, whole = (
                {name: kept.get(id(x), x) for name, x in named.items()}
                for named in (own, whole)
            )
            if stage in firsts:
                made = make_kept_optimizer(firsts[stage], settings, own, models, kept)
        reducer: GradientSum | None = None
        if shards is not None:
            refuse_shard_steps(settings, own, models or whole, mine)
            reducer = shards.reducer([*own.values()], what)
        elif group is not None:
            reducer = Reducer([*mine.values()], group, what)
        updaters[stage] = Updater(
            mine,
            settings,
            reducer=reducer,
            whole=whole,
            optimizer=made,
            models=models,
            masters=own_masters,
        )
        updated[stage] = mine
    return updaters, updated


def _optimizers_of_whole(
    owned: Mapping[int, Mapping[str, nn.Parameter]], nets: Mapping[int, NetSetup]
) -> dict[int, torch.optim.Optimizer]:
    """Return the optimizers of stages, made of their weights while these are whole."""
    found = {}
    for stage, own in owned.items():
        settings, every = nets[stage].settings, Parameters(nets[stage].parameters)
        assert settings is not None
        if trained := Parameters(own):
            found[stage] = settings.make_stage_optimizer(trained, every)
    return found


def _trained(
    shared: Mapping[str, Sequence[int]], modules: Sequence[StageModule]
) -> dict[str, Sequence[int]]:
    """Return those of the shared weights that are trained."""
    return {
        name: stages
        for name, stages in shared.items()
        if dict(modules[stages[0]].named_parameters())[name].requires_grad
    }


def _shared(
    nets: Sequence[NetSetup], schedule: Schedule
) -> Mapping[str, Sequence[int]]:
    """Return the stages that hold each weight that stages of the trained net share.

    Raises:
        ModelError: several nets are trained, or their stages have delays, and holders
            are on several devices or of several delays; or stages that follow others
            with a delay share a weight on one device.
    """
    program = schedule.program
    found = {
        net.name: {
            name: [stages_of(program, net.name)[place] for place in places]
            for name, places in shared_parameters(net.modules).items()
        }
        for net in nets
    }
    trained = [net.name for net in nets if net.settings is not None]
    is_fresh = not any(x.trainable and x.delay for x in program.stages)
    if len(nets) == 1 or (len(trained) == 1 and is_fresh):
        for net in {*found}.difference(trained):
            _refuse_following(net, found[net], program)
        return found[trained[0]]
    for net, shared in found.items():
        for name, numbers in shared.items():
            stages = [program.stages[number] for number in numbers]
            moves = any(stage.moves for stage in stages)
            if moves and len({(x.device, x.delay) for x in stages}) > 1:
                raise ModelError(
                    f"stages {', '.join(map(str, numbers))} of net {net} share {name}, "
                    "on several devices or with several delays: in a program of "
                    "several trained nets, or with old weights, put them on one "
                    "device, or untie it"
                )
    return {}


def _refuse_following(
    net: str, shared: Mapping[str, Sequence[int]], program: Program
) -> None:
    """Refuse weights of a teacher of which one device would keep two old versions.

    Raises:
        ModelError: stages that follow others with a delay share a weight on a device.
    """
    for name, numbers in shared.items():
        stages = [program.stages[number] for number in numbers]
        devices = {stage.device for stage in stages}
        if stages[0].follows and stages[0].delay and len(devices) < len(stages):
            raise ModelError(
                f"stages {', '.join(map(str, numbers))} of net {net} follow others "
                f"with a delay of {stages[0].delay} and share {name} on one device: "
                "take delay=0, put them on several devices, or untie it"
            )


def _followers(
    schedule: Schedule,
    nets: Mapping[str, NetSetup],
    runners: Mapping[int, StageRunner],
    shards: Shards | None,
) -> dict[int, Follower]:
    stages = schedule.program.stages
    following = {n: runner for n, runner in runners.items() if stages[n].follows}
    device = next(stages[stage].device for stage in runners)
    found = {}
    for stage, own in owned_parameters(following, schedule, device).items():
        net = nets[stages[stage].net]
        assert net.follows is not None
        found[stage] = follow(
            net.follows,
            runners[stage].module,
            own,
            {other: runners[other].module for other in stages[stage].follows},
            f"stage {stage} of net {net.name}",
        )
        if shards is not None:  # those of both nets are cut in the same places
            found[stage].weights = found[stage].weights.parts(shards.part_of)
    return found


def add_batch_losses(
    table: StageTable,
    program: Program,
    nets: Mapping[str, NetSetup],
    runners: Mapping[int, StageRunner],
    layout: Layout,
    groups: _ReductionGroups,
) -> None:
    """Add ops L and G to a table.

    Args:
        table: this worker's.
        program: the whole.
        nets: by name.
        runners: this device's stages.
        layout: this worker's place.
        groups: the workers that gather outputs.
    """
    for stage, runner in runners.items():
        net = nets[program.stages[stage].net]
        if stage in program.gathered_stages:
            group = groups.reduces(stage)
            assert group is not None, "several replicas"
            own = table.maker.made(Fact.OUTPUT, stage, OP_G)
            output = table.maker.gathered(stage)
            table.stages[stage].gather = Gather(net.name, own, output, group)
        if stage in program.loss_stages and net.loss is not None:
            gathers = program.gathers(stage)
            fact = Fact.GATHERED if gathers else Fact.OUTPUT
            forms = (net.output, *net.others.get(stage, ()))
            inputs = []
            for source, form in zip(program.loss_inputs(stage), forms, strict=True):
                facts = program.stages[source]
                assert form is not None
                trained = program.stages[stage].trainable and facts.trainable
                way = table.maker.made(fact, source, stage)
                inputs.append(LossInput(facts.net, form, way, trained))
            table.stages[stage].loss = BatchLoss(
                runner,
                inputs,
                table.maker.loss_gradient(stage),
                layout.pipeline if gathers else None,
            )


class _ReductionGroups:
    """Which workers add up gradients (R), gather outputs (G) and add up losses.

    Collectives of one group must begin in one order on all members. Ops R and G do,
    since `check` proves it. Where a device has several lanes, an op of one lane and a
    collective that follows from an op of another have no order: each then has a group
    of its own. Every worker must make them at the same time.

    Args:
        schedule: what is played.
        context: this worker's.
        replicas: this worker and its replicas; None where there is one replica.
    """

    def __init__(
        self, schedule: Schedule, context: WorkerContext, replicas: WorkerGroup | None
    ) -> None:
        self._context = context
        self._replicas = replicas
        program = schedule.program
        self._apart = len(schedule.lanes) > program.num_devices
        self._stages: dict[int, WorkerGroup | None] = dict.fromkeys(
            range(program.num_stages), replicas
        )
        made: dict[object, WorkerGroup | None] = {}
        for stage in sorted(program.reduced_stages | program.gathered_stages):
            copies = program.copies_of[stage]
            if len(copies) == 1 and not self._apart:
                continue
            devices = tuple(sorted({program.stages[copy].device for copy in copies}))
            key = copies if self._apart else devices
            if key not in made:
                made[key] = self._joined(devices)
            self._stages[stage] = made[key]

    def reduces(self, stage: int) -> WorkerGroup | None:
        """Return the workers that add up a stage's gradients."""
        return self._stages[stage]

    def losses(self) -> WorkerGroup | None:
        """Return the workers that add up losses; every worker must call this."""
        return self._context.with_replicas() if self._apart else self._replicas

    def _joined(self, devices: tuple[int, ...]) -> WorkerGroup | None:
        layout = self._context.layout
        ranks = tuple(
            sorted(rank for device in devices for rank in layout.ranks_of(device))
        )
        if len(ranks) == 1:
            return None
        groups = self._context.groups.join([ranks])
        return groups[0] if groups else None
