"""All that one worker needs to play its lane, put together once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from hocket.model.cut import StageModule, shared_parameters
from hocket.run.build import Plan
from hocket.run.group import Group
from hocket.run.layout import Layout, replica_group
from hocket.run.loss import LossFunction
from hocket.run.mail import Mail
from hocket.run.reduce import Reducer
from hocket.run.results import Results
from hocket.run.ring import Ring
from hocket.run.same_batch import ReplicaCheck
from hocket.run.shared_weights import (
    add_up_ties,
    equal_start,
    find_ties,
    owned_parameters,
    tie_groups,
    tie_reducers,
)
from hocket.run.stage import StageRunner
from hocket.run.transport import Transport
from hocket.run.update import OptimizerFactory, SchedulerFactory, Updater
from hocket.run.worker import Hooks, Work, Worker
from hocket.run.world import World


@dataclass
class Crew:
    """One worker's stages and what serves them.

    Args:
        runners: this device's stages by number.
        updaters: likewise.
        mail: to the neighbours.
        results: the losses of a step, for everyone.
        worker: plays the lane.
        transport: carries all messages.
        store: with a prefix of this pipeline's own.
        replicas: to see that all have the same batch, where there are any.
        work: the step's data.
    """

    runners: dict[int, StageRunner]
    updaters: dict[int, Updater]
    mail: Mail
    results: Results
    worker: Worker
    transport: Transport
    store: dist.Store
    replicas: ReplicaCheck | None
    work: Work | None = None

    def begin(self, work: Work) -> None:
        """Switch to training, and remember the step's data for the losses."""
        self.work = work
        for runner in self.runners.values():
            runner.train(mode=True)
        if self.replicas is not None:
            self.replicas.begin(work.step)


def make_crew(
    plan: Plan,
    modules: Sequence[StageModule],
    loss: LossFunction,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    world: World,
    store: dist.Store,
    layout: Layout,
    ring: Ring,
    transport: Transport,
    *,
    seed: int,
    timeout_s: float,
) -> Crew:
    """Put one worker together. Every worker must do so at the same time."""
    program = plan.schedule.program
    runners = _make_runners(plan, modules, loss, world, layout, seed=seed)
    group = replica_group(layout, timeout_s, ring.wait)
    ties = find_ties(shared_parameters(modules), plan.schedule)
    groups = tie_groups(ties, layout, timeout_s, ring.wait)
    equal_start(runners, layout, group, ties, groups)
    owned = owned_parameters(runners, plan.schedule, layout.device)
    updaters = {
        stage: Updater(
            parameters,
            optimizer,
            scheduler,
            reducer=_reducer(stage, list(parameters.values()), group),
        )
        for stage, parameters in owned.items()
    }
    mail = Mail(
        plan.schedule,
        layout.device,
        layout.ranks,
        transport,
        store,
        prefix="",
        timeout_s=timeout_s,
    )
    last_device = program.stages[-1].device
    results = Results(
        layout.ranks,
        last_device,
        layout.device,
        transport,
        group if layout.device == last_device else None,
        store,
        timeout_s=timeout_s,
    )
    tied = tie_reducers(ties, groups, owned)
    replicas = None if group is None else ReplicaCheck(group)
    crew: Crew

    def after_losses() -> None:
        assert crew.work is not None
        last = crew.runners[program.num_stages - 1]
        step = crew.work.step.number
        losses = {m: named for (s, m), named in last.losses.items() if s == step}
        shares = [crew.work.share(m) for m in range(len(crew.work.microbatches))]
        results.begin(losses, shares)
        last.losses.clear()

    def before_updates() -> None:
        if replicas is not None:
            replicas.finish()
        if not tied:
            return
        for updater in crew.updaters.values():
            updater.wait()
        add_up_ties(tied)

    worker = Worker(
        plan.schedule,
        layout.device,
        runners,
        updaters,
        mail,
        ring,
        Hooks(after_losses, before_updates),
    )
    crew = Crew(runners, updaters, mail, results, worker, transport, store, replicas)
    return crew


def _reducer(
    stage: int, parameters: Sequence[nn.Parameter], group: Group | None
) -> Reducer | None:
    if group is None:
        return None
    return Reducer(parameters, group, f"gradients of stage {stage}")


def _make_runners(
    plan: Plan,
    modules: Sequence[StageModule],
    loss: LossFunction,
    world: World,
    layout: Layout,
    *,
    seed: int,
) -> dict[int, StageRunner]:
    last = len(modules) - 1
    return {
        stage: StageRunner(
            stage,
            modules[stage].to(world.device),
            loss if stage == last else None,
            device=world.device,
            seed=seed,
            first_microbatch=layout.replica
            * plan.schedule.program.num_microbatches_of(0),
        )
        for stage in plan.schedule.program.stages_on[layout.device]
    }
