"""Put together everything that one worker needs to play its lanes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import nn

from hocket.core.gates import gates_of
from hocket.errors import ModelError
from hocket.model.stages.cut import StageModule, shared_parameters
from hocket.passes.one_step import one_step
from hocket.run.cluster.group import WorkerGroup
from hocket.run.comm.all_sum import AllSum
from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.data.loss import LossFunction
from hocket.run.device.out_of_memory import MemoryWatch
from hocket.run.engine.executor import Executor
from hocket.run.engine.gate import Gate
from hocket.run.engine.plan import Plan
from hocket.run.engine.play_plan import PlayPlan
from hocket.run.engine.player import Player
from hocket.run.engine.point_to_point import PointToPoint
from hocket.run.engine.refusals import refuse_hooks, refuse_shared
from hocket.run.engine.results import Results
from hocket.run.engine.step_sync import Norms, StepSync
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.precision import LossScale, Precision
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradients import Gradients
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.stale_ties.make import give_versions
from hocket.run.weights.stale_ties.stale_tie import find_stale_ties
from hocket.run.weights.tied_weights import (
    Tie,
    equal_start,
    find_ties,
    owned_parameters,
    tie_groups,
    tie_reducers,
)
from hocket.run.weights.updater import Updater


def make_executor(
    plan: Plan,
    play_plan: PlayPlan,
    model: nn.Module,
    modules: Sequence[StageModule],
    loss: LossFunction,
    settings: TrainingConfig,
    context: WorkerContext,
    channels: PointToPoint,
    *,
    seed: int,
) -> Executor:
    """Make this worker's executor. Every worker must do so at the same time.

    Args:
        plan: what a pipeline decided.
        play_plan: its schedule, planned op by op.
        model: uncut.
        modules: all stages.
        loss: as for the pipeline.
        settings: how to train.
        context: this worker's.
        channels: its messages.
        seed: for random numbers in the forward.

    Raises:
        ModelError: the weights' types do not go with the precision asked for; or a
            shared weight is updated at two times.
    """
    _check_types(modules, settings.precision)
    schedule, layout = plan.schedule, context.layout
    runners = _make_runners(plan, modules, loss, settings, context, seed=seed)
    replicas = context.with_replicas()
    shared = shared_parameters(modules)
    stale_ties = (
        find_stale_ties(_trained(shared, modules), schedule) if schedule.body else []
    )
    if schedule.body:
        refuse_shared(stale_ties, schedule)
        for stage, module in enumerate(modules):  # alike on all workers
            if schedule.program.stages[stage].delay:
                refuse_hooks(stage, dict(module.named_parameters()))
    ties = find_ties(shared, schedule)
    groups = tie_groups(ties, layout, context.timeout_s, context.recorder.wait)
    equal_start(runners, layout, replicas, ties, groups)
    owned = owned_parameters(runners, one_step(schedule), layout.device, stale_ties)
    updaters = {
        stage: Updater(
            own,
            settings,
            reducer=_reducer(stage, own, replicas),
            delay=schedule.program.stages[stage].delay,
        )
        for stage, own in owned.items()
    }
    stale_names = {tie.name for tie in stale_ties}
    ties = [
        tie for tie in ties if tie.name not in stale_names
    ]  # these are equal by now
    parts = _Parts(
        play_plan,
        modules,
        settings,
        context,
        updaters,
        _stage_of(model, modules),
        ties,
        {
            stage: tie_reducers(ties, groups, {stage: own})
            for stage, own in owned.items()
        },
        _make_scale(settings.precision, context.world.device),
    )
    predicts = settings.correction == "weight-prediction"
    predict = {stage: x.predicted for stage, x in updaters.items() if predicts}
    worker_ties = give_versions(
        runners, schedule.program, stale_ties, predict, layout, context.transport
    )
    results = context.results(schedule, replicas)
    sync = parts.sync(runners, results, replicas)
    watch = MemoryWatch(schedule, plan.costs, context.world, layout.device)
    player = Player(
        play_plan,
        layout.device,
        runners,
        updaters,
        channels,
        context.recorder,
        sync,
        worker_ties,
        on_error=watch.on_error,
        lanes=context.lanes,
    )
    return Executor(
        play_plan,
        runners,
        updaters,
        results,
        parts.scale,
        context.transport,
        context.store,
        context.world.device,
        player,
        sync,
        worker_ties,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What gates are made from.

    Args:
        plan: what is played.
        modules: all stages.
        settings: how to train.
        context: this worker's.
        updaters: this device's, by stage.
        stage_of: the stage of each trained parameter, in the uncut model's order.
        ties: the weights that stages on several devices hold.
        tie_sums: of each of this device's stages, the sums of their gradients.
        scale: the loss scale, where the precision needs one.
        norms: the norms that gates have seen.
    """

    plan: PlayPlan
    modules: Sequence[StageModule]
    settings: TrainingConfig
    context: WorkerContext
    updaters: dict[int, Updater]
    stage_of: dict[str, int]
    ties: Sequence[Tie]
    tie_sums: Mapping[int, Sequence[Reducer]]
    scale: LossScale | None
    norms: Norms = field(default_factory=Norms)

    def sync(
        self,
        runners: Mapping[int, StageRunner],
        results: Results,
        replicas: WorkerGroup | None,
    ) -> StepSync:
        """Make what is exchanged in each step. Every worker must call this."""
        program = self.plan.program
        gates, gate_of = self._gates()
        everyone = None
        if self.plan.overlaps:
            sums = self.context.with_everyone()
            everyone = self._gradients(sums, self._counted(), self.updaters)
        return StepSync(
            runners,
            program.num_stages - 1,
            results,
            None if replicas is None else ReplicaCheck(replicas),
            gates,
            gate_of,
            everyone,
            self.norms,
        )

    def _gates(self) -> tuple[list[Gate], dict[int, Gate]]:
        """All stages together; or, where steps overlap, each delay or each stage."""
        clips = self.settings.clip_norm is not None
        overlaps, stages = self.plan.overlaps, self.plan.program.stages
        groups = gates_of(self.plan.program, overlaps=overlaps, clips=clips)
        waits = clips or not overlaps
        gates: list[Gate] = []
        gate_of: dict[int, Gate] = {}
        for number, group in enumerate(groups):
            own = [n for n in group if stages[n].device == self.context.layout.device]
            gate = self._gate(number, group, own, waits=waits)
            if gate is not None:
                gates.append(gate)
                gate_of |= dict.fromkeys(own, gate)
        return gates, gate_of

    def _gate(
        self, number: int, group: Sequence[int], own: Sequence[int], *, waits: bool
    ) -> Gate | None:
        """Make this worker's part; None where it has none. Every worker must call."""
        layout, stages = self.context.layout, self.plan.program.stages
        devices = sorted({stages[n].device for n in group})
        if not self.plan.overlaps:
            devices = list(range(layout.num_devices))  # errors are raised on all
        sums = None
        if waits and (len(devices) > 1 or not self.plan.overlaps):
            sums = self.context.with_devices(devices, f"norms of gate {number}")
        if layout.device not in devices:
            return None
        counts = layout.replica == 0
        counted = self._counted() if counts or sums is None else set()
        return Gate(
            own,
            self._gradients(sums, counted, own),
            self.updaters,
            self.tie_sums,
            self.stage_of,
            waits=waits,
            counts=counts,
            clip_norm=self.settings.clip_norm,
            scale=self.scale,
            on_norms=self.norms.add if self.plan.overlaps else _ignore,
        )

    def _counted(self) -> set[str]:
        """The weights whose norms this device posts: those of which it is the first."""
        own = self.context.layout.device
        elsewhere = {tie.name for tie in self.ties if tie.devices[0] != own}
        return self.stage_of.keys() - elsewhere

    def _gradients(
        self, sums: AllSum | None, counted: Collection[str], stages: Iterable[int]
    ) -> Gradients:
        held = {
            name: parameter
            for stage in stages
            for name, parameter in self.updaters[stage].parameters.items()
            if parameter.requires_grad
        }
        types = {
            parameter.dtype
            for module in self.modules
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        return Gradients(
            tuple(self.stage_of),
            held,
            frozenset(held).intersection(counted),
            sums,
            device=self.context.world.device,
            dtype=reduce(torch.promote_types, types or {torch.float32}),
        )


def _ignore(step: int, norms: torch.Tensor) -> None:
    """Keep nothing: one gate knows the norms of all gradients."""


def _check_types(modules: Sequence[StageModule], precision: Precision) -> None:
    """Refuse short weights under autocast: float16 gradients cannot be unscaled."""
    if precision is Precision.FLOAT32:
        return
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise ModelError(
                    f"precision={precision.value!r} keeps the weights in float32 and "
                    f"computes in {precision.value}, but {name} is "
                    f"{parameter.dtype}: give the model in float32, or leave out "
                    "precision="
                )


def _make_runners(
    plan: Plan,
    modules: Sequence[StageModule],
    loss: LossFunction,
    settings: TrainingConfig,
    context: WorkerContext,
    *,
    seed: int,
) -> dict[int, StageRunner]:
    world, layout = context.world, context.layout
    each = plan.schedule.program.num_microbatches_of(0)
    num_parts = each * layout.num_replicas * settings.accumulate
    last = len(modules) - 1
    return {
        stage: StageRunner(
            stage,
            modules[stage].to(world.device),
            loss if stage == last else None,
            device=world.device,
            seed=seed,
            first_microbatch=layout.replica * each,
            precision=settings.precision,
            recomputes=plan.costs.stages[stage].recomputes,
            checks_loss=num_parts > 1,
        )
        for stage in plan.schedule.program.stages_on[layout.device]
    }


def _reducer(
    stage: int, parameters: Mapping[str, nn.Parameter], group: WorkerGroup | None
) -> Reducer | None:
    if group is None:
        return None
    what = f"gradients of stage {stage}"
    return Reducer(list(parameters.values()), group, what)


def _make_scale(precision: Precision, device: torch.device) -> LossScale | None:
    if precision is not Precision.FLOAT16:
        return None
    return LossScale(torch.amp.GradScaler(device.type), device)


def _trained(
    shared: Mapping[str, Sequence[int]], modules: Sequence[StageModule]
) -> dict[str, Sequence[int]]:
    """Return those of the shared weights that are trained."""
    return {
        name: stages
        for name, stages in shared.items()
        if dict(modules[stages[0]].named_parameters())[name].requires_grad
    }


def _stage_of(model: nn.Module, modules: Sequence[StageModule]) -> dict[str, int]:
    """Return the first stage of each trained parameter, in the model's order."""
    found: dict[str, int] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(name, stage)
    return {name: found[name] for name, _ in model.named_parameters() if name in found}
