"""Put together all that one worker needs to play its lane."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from hocket.errors import ModelError
from hocket.model.stages.cut import StageModule, shared_parameters
from hocket.passes.one_step import one_step
from hocket.run.cluster.group import Group
from hocket.run.comm.all_sum import SumOfAll
from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.data.loss import LossFunction
from hocket.run.device.out_of_memory import MemoryWatch
from hocket.run.engine.executor import StepCrew, StreamCrew
from hocket.run.engine.flush_free_check import refuse_hooks, refuse_shared
from hocket.run.engine.flush_free_sync import StreamEnds
from hocket.run.engine.hooks import Hooks
from hocket.run.engine.plan import Plan
from hocket.run.engine.point_to_point import Mail
from hocket.run.engine.step_sync import StepEnds
from hocket.run.engine.stream_worker import StreamWorker
from hocket.run.engine.worker import Worker
from hocket.run.engine.worker_context import Place
from hocket.run.stage.precision import LossScale, Precision
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradients import Gradients
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.settings import Settings
from hocket.run.weights.stale_ties.loan import Loan, find_loans
from hocket.run.weights.stale_ties.make import give_versions
from hocket.run.weights.tied_weights import (
    Tie,
    equal_start,
    find_ties,
    owned_parameters,
    tie_groups,
    tie_reducers,
)
from hocket.run.weights.updater import Updater


def make_crew(
    plan: Plan,
    model: nn.Module,
    modules: Sequence[StageModule],
    loss: LossFunction,
    settings: Settings,
    place: Place,
    mail: Mail,
    *,
    seed: int,
) -> StepCrew | StreamCrew:
    """Put one worker together. Every worker must do so at the same time.

    Raises:
        ModelError: the weights' types do not go with the precision asked for; or a
            shared weight is updated at two times.
        RecipeError: a setting does not go with an order without flushes.
    """
    _check_types(modules, settings.precision)
    schedule, layout = plan.schedule, place.layout
    runners = _make_runners(plan, modules, loss, settings, place, seed=seed)
    replicas = place.with_replicas()
    shared = shared_parameters(modules)
    loans = find_loans(_trained(shared, modules), schedule) if schedule.body else []
    if schedule.body:
        refuse_shared(loans, schedule)
        for stage, module in enumerate(modules):  # alike on all workers
            if schedule.program.stages[stage].delay:
                refuse_hooks(stage, dict(module.named_parameters()))
    ties = find_ties(shared, schedule)
    groups = tie_groups(ties, layout, place.timeout_s, place.ring.wait)
    equal_start(runners, layout, replicas, ties, groups)
    alone = one_step(schedule)
    owned = owned_parameters(runners, alone, layout.device, loans)
    updaters = {
        stage: Updater(
            own,
            settings,
            reducer=_reducer(stage, own, replicas),
            delay=schedule.program.stages[stage].delay,
        )
        for stage, own in owned.items()
    }
    stage_of = _stage_of(model, modules)
    lent = {loan.name for loan in loans}
    ties = [tie for tie in ties if tie.name not in lent]  # these are equal by now
    known = _Known(
        plan, modules, settings, place, mail, runners, updaters, stage_of, ties, loans
    )
    if schedule.body:
        sums = {
            stage: tie_reducers(ties, groups, {stage: own})
            for stage, own in owned.items()
        }
        return _stream_crew(known, replicas, sums)
    return _step_crew(known, replicas, tie_reducers(ties, groups, owned))


@dataclass(frozen=True, slots=True)
class _Known:
    """What both kinds of crews are made from."""

    plan: Plan
    modules: Sequence[StageModule]
    settings: Settings
    place: Place
    mail: Mail
    runners: dict[int, StageRunner]
    updaters: dict[int, Updater]
    stage_of: dict[str, int]
    ties: Sequence[Tie]
    loans: Sequence[Loan]

    def counted(self) -> set[str]:
        """The weights whose gradients this device tells of: one of their holders."""
        own = self.place.layout.device
        elsewhere = {tie.name for tie in self.ties if tie.devices[0] != own}
        return self.stage_of.keys() - elsewhere

    def watch(self) -> MemoryWatch:
        """Tells of a device without memory."""
        plan, place = self.plan, self.place
        device = place.layout.device
        return MemoryWatch(plan.schedule, plan.costs, place.world, device)

    def gradients(
        self, all_workers: SumOfAll | None, told: Collection[str], stages: Iterable[int]
    ) -> Gradients:
        """Of some of this device's stages, of which these names are told."""
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
            frozenset(held).intersection(told),
            all_workers,
            device=self.place.world.device,
            dtype=reduce(torch.promote_types, types or {torch.float32}),
        )


def _step_crew(
    known: _Known, replicas: Group | None, tie_sums: Sequence[Reducer]
) -> StepCrew:
    place, settings, plan = known.place, known.settings, known.plan
    world, layout, schedule = place.world, place.layout, plan.schedule
    everyone = place.with_everyone()
    told = known.counted() if layout.replica == 0 else set()
    results = place.results(schedule, replicas)
    scale = _make_scale(settings.precision, world.device)
    ends = StepEnds(
        known.runners,
        known.updaters,
        schedule.program.num_stages - 1,
        known.stage_of,
        results,
        None if replicas is None else ReplicaCheck(replicas),
        tie_sums,
        known.gradients(everyone, told, known.updaters),
        scale,
        settings.clip_norm,
    )
    hooks = Hooks(
        ends.after_losses,
        ends.before_updates,
        on_error=known.watch().on_error,
    )
    worker = Worker(
        schedule,
        layout.device,
        known.runners,
        known.updaters,
        known.mail,
        place.ring,
        hooks,
    )
    return StepCrew(
        known.runners,
        known.updaters,
        results,
        scale,
        place.transport,
        place.store,
        world.device,
        ends,
        worker,
    )


def _stream_crew(
    known: _Known,
    replicas: Group | None,
    tie_sums: Mapping[int, Sequence[Reducer]],
) -> StreamCrew:
    place, schedule = known.place, known.plan.schedule
    world, layout = place.world, place.layout
    predicts = known.settings.correction == "weight-prediction"
    predict = {stage: x.predicted for stage, x in known.updaters.items() if predicts}
    loans = give_versions(
        known.runners, schedule.program, known.loans, predict, layout, place.transport
    )
    results = place.results(schedule, replicas)
    names = known.counted()
    everyone = known.gradients(place.with_everyone(), names, known.updaters)
    ends = StreamEnds(
        known.runners,
        schedule.program.num_stages - 1,
        known.stage_of,
        results,
        None if replicas is None else ReplicaCheck(replicas),
        tie_sums,
        everyone,
        {stage: known.gradients(None, names, [stage]) for stage in known.updaters},
        _clip_groups(known),
        known.settings.clip_norm,
        counts=layout.replica == 0,
    )
    hooks = Hooks(
        ends.after_losses,
        after_backwards=ends.after_backwards,
        after_gradients=ends.after_gradients,
        before_update=ends.before_update,
        on_error=known.watch().on_error,
    )
    worker = StreamWorker(
        schedule,
        layout.device,
        known.runners,
        known.updaters,
        known.mail,
        place.ring,
        hooks,
        loans,
    )
    return StreamCrew(
        known.runners,
        known.updaters,
        results,
        None,
        place.transport,
        place.store,
        world.device,
        ends,
        worker,
        loans,
    )


def _clip_groups(known: _Known) -> dict[int, Gradients]:
    """Of each stage of this device: its gradients, as a part of its delay's."""
    if known.settings.clip_norm is None:
        return {}
    place, stages = known.place, known.plan.schedule.program.stages
    groups: dict[int, Gradients] = {}
    for delay in sorted({stage.delay for stage in stages}):
        devices = {stage.device for stage in stages if stage.delay == delay}
        # A group of one device knows its norm; every worker makes those of all.
        sums = None
        if len(devices) > 1:
            sums = place.with_everyone(f"norms of delay {delay}")
        for stage in known.updaters:
            if stages[stage].delay == delay:
                counted = place.layout.replica == 0 or sums is None
                told = known.counted() if counted else set()
                groups[stage] = known.gradients(sums, told, [stage])
    return groups


def _check_types(modules: Sequence[StageModule], precision: Precision) -> None:
    """Autocast takes weights in float32: gradients of float16 cannot be unscaled."""
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
    settings: Settings,
    place: Place,
    *,
    seed: int,
) -> dict[int, StageRunner]:
    world, layout = place.world, place.layout
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
    stage: int, parameters: Mapping[str, nn.Parameter], group: Group | None
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
    """Those of the shared weights that are trained."""
    return {
        name: stages
        for name, stages in shared.items()
        if dict(modules[stages[0]].named_parameters())[name].requires_grad
    }


def _stage_of(model: nn.Module, modules: Sequence[StageModule]) -> dict[str, int]:
    """The first stage of each parameter that is trained, in the model's order."""
    found: dict[str, int] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(name, stage)
    return {name: found[name] for name, _ in model.named_parameters() if name in found}
