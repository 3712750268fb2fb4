"""Cuts a net that is being trained again, for another layout of the same workers.

    4 stages x 1 replica      a b │ c d │ e f │ g h
    frozen: a b c d           ▼ weights, moments and rates move by name
    2 stages x 2 replicas     [a b c d] e f │ g h      [a b c d] e f │ g h

What is frozen is a stage of its own on the first device of each replica, forward only.
Or each layer stays on its device (`recut=False`):

    frozen: a b c             [a b] │ [c] d │ e f │ g h
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.freeze.shapes import Balance, Frozen, Prediction, with_frozen_layers
from hocket.model.capture.captured import Captured
from hocket.model.profile.work import layer_weights
from hocket.model.stages.cut import StageModule
from hocket.model.trace.state import saved_tensors
from hocket.planner.stages import StageSlowdown, stage_costs
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.store.values import decode, encode
from hocket.run.cluster.world import World
from hocket.run.comm.bundles import Bundle
from hocket.run.comm.transport import Channel, Post, Receiver, Sender, Transport
from hocket.run.data.loss import LossFunction
from hocket.run.device.memory import MemoryWatch
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.engine.lanes.play_plan import plan_to_play
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.make_executor import make_executor
from hocket.run.engine.plan import Plan
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.engine.same_everywhere import refuse_differences
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.net import (
    Holders,
    Move,
    NetOnWorker,
    holders_of,
    plan_moves,
    transfer,
)
from hocket.run.stage.loss_checks.reads import ModelTensors
from hocket.run.tune.order import make_order
from hocket.run.weights.migration import (
    CommonState,
    bundle_of,
    restore_updater,
    tensor_in,
)
from hocket.run.weights.settings import TrainingConfig

_End = TypeVar("_End", Sender, Receiver)


@dataclass(frozen=True, slots=True)
class SameSettings:
    """What stays the same in every layout.

    Args:
        schedule: the name of the schedule.
        num_parts: the microbatches of the whole batch.
        loss: the loss of a microbatch.
        training: how parameters are updated.
        seed: the seed of random numbers in the forward.
        parameter_names: the uncut model's names, in its order.
        balance: how stages are cut: see `hocket.PipelineConfig`.
        recut: whether layers change their devices when others freeze.
        tensors: the uncut model's, which the loss must not read.
    """

    schedule: str
    num_parts: int
    loss: LossFunction
    training: TrainingConfig
    seed: int
    parameter_names: tuple[str, ...]
    balance: Balance = "exact"
    recut: bool = True
    tensors: ModelTensors | None = None


class Reshaper:
    """Cuts one net again and again.

    Args:
        job: what stays.
        net: the net, with this worker's stages.
        context: this worker's connections in the first layout.
        plan: the first layout's.
    """

    def __init__(
        self, job: SameSettings, net: NetOnWorker, context: WorkerContext, plan: Plan
    ) -> None:
        self.job = job
        self.net = net
        self._context = context
        self._model = price_layers(plan, net.outline, job.balance)
        if not job.recut:
            self._model = replace(self._model, kept=plan.boundaries)
        self._transports: list[RenamedTransport] = []  # of the last layouts
        self._number = 0

    def costs_of(self, num_frozen_layers: int) -> Frozen:
        """Return the costs of the captured model's layers, some of them frozen."""
        return replace(self._model, num_frozen=num_frozen_layers)

    def reshape(
        self, now: PlayedLayout, chosen: Prediction, num_frozen_layers: int, step: int
    ) -> PlayedLayout:
        """Cut the net as chosen. Every worker must call this, between two steps.

        The former layout stays as it was until `keep` or `undo` is called.

        Args:
            now: what was played so far.
            chosen: stages, replicas and boundaries.
            num_frozen_layers: layers of the captured model that are frozen.
            step: the number of the next step.

        Raises:
            HocketError: see `hocket.Pipeline`.
        """
        self._number += 1
        context = self._next_context(chosen)
        context.recorder.begin("change of layout", step)
        layout = context.layout
        order = make_order(
            self.job.schedule,
            layout,
            self.job.num_parts // layout.num_pipelines,
            None,
            clips=self.job.training.clip_norm is not None,
        )
        order = with_frozen_layers(order, chosen.boundaries, num_frozen_layers)
        flows = order.program.flows
        received, kept = self._move(now, chosen, order.program, layout)
        here = order.program.stages_on[layout.device]
        modules = self.net.cut(
            chosen.boundaries,
            here,
            {name: tensor_in(bundle) for name, bundle in received.items()},
            flows,
        )
        plan = self._plan(now.plan, chosen, order, modules, num_frozen_layers)
        refuse_differences(context.world, {"plan": plan.digest})
        before = common_state(now, context.world)  # a new schedule may set its rates
        executor = self._executor(plan, modules, context)
        bundles = {**kept, **received}
        for stage, updater in executor.updaters.items():
            if not order.program.stages[stage].trainable:
                parameters = executor.runners[stage].parameters.items()
                updater.hold_frozen({n: p for n, p in parameters if p.requires_grad})
            restore_updater(updater, bundles, before)
        if executor.scaler is not None and now.executor.scaler is not None:
            executor.scaler.load_state_dict(now.executor.scaler.state_dict())
        executor.resume_from(step)
        context.recorder.end()
        return PlayedLayout(plan, executor)

    def priced_again(self, played: PlayedLayout, prefix_s: float) -> PlayedLayout:
        """Return what is played, with other seconds of what is frozen.

        Args:
            played: some layers are frozen.
            prefix_s: the seconds of a microbatch's frozen layers from now on.
        """
        frozen, *others = played.plan.costs.stages
        stages = (replace(frozen, forward_s=prefix_s), *others)
        costs = replace(played.plan.costs, stages=stages)
        predicted = simulate(played.plan.schedule, costs)
        plan = replace(played.plan, costs=costs, predicted=predicted)
        return replace(played, plan=plan)

    def keep(self) -> None:
        """Close what the layouts before the present one have opened."""
        while len(self._transports) > 1:
            self._transports.pop(0).close()

    def undo(self, before: PlayedLayout, after: PlayedLayout) -> None:
        """Return to the former layout; no step was played in the new one.

        Args:
            before: the former layout.
            after: the one that `reshape` returned.
        """
        after.executor.sync.give_up()
        self._transports.pop().close()
        runners = before.executor.runners.items()
        self.net.adopt({number: runner.module for number, runner in runners})

    def _next_context(self, chosen: Prediction) -> WorkerContext:
        """Return this worker's connections in the next layout."""
        first = self._context
        first.groups.again()
        prefix = f"layout {self._number} "
        self._transports.append(RenamedTransport(first.transport, prefix))
        return replace(
            first,
            layout=make_layout(first.world, chosen.shape.num_replicas),
            transport=self._transports[-1],
            store=dist.PrefixStore(prefix, first.store),
        )

    def _move(
        self, now: PlayedLayout, chosen: Prediction, program: Program, layout: Layout
    ) -> tuple[Mapping[str, Bundle], Mapping[str, Bundle]]:
        """Send what other workers need; return what came, and what was here."""
        net, world = self.net, self._context.world
        held, names = (net.names(x.boundaries) for x in (now.plan, chosen))
        before = self._holders(now.plan.schedule.program, now.layout, held)
        after = self._holders(program, layout, names)
        here = net.tensors
        updaters = now.executor.updaters.values()
        trained = {
            name: updater
            for updater in updaters
            for name in (*updater.parameters, *(updater.ema or ()))
        }
        frozen = {
            name
            for stage, own in zip(program.stages, names, strict=True)
            if not stage.trainable
            for name in own
        }

        def bundle(_: str, name: str) -> Bundle:
            updater, is_frozen = trained.get(name), name in frozen
            return bundle_of(name, here[name], updater, is_frozen=is_frozen)

        moves = self._moves(before, after, now.layout, layout)
        came = transfer(moves, bundle, world)
        received = {name: x for (_, name), x in came.items()}
        return received, {name: bundle(net.name, name) for name in here}

    def _holders(
        self, program: Program, layout: Layout, names: Sequence[Set[str]]
    ) -> Holders:
        workers = [{*layout.ranks_of(x.device)} for x in program.stages]
        return holders_of(self.net.name, names, workers)

    def _moves(
        self, before: Holders, after: Holders, now: Layout, then: Layout
    ) -> list[Move]:
        """Plan the moves; each replica keeps its own buffers (batch norms' statistics).

        Where the number of replicas changes, all take the first replica's.

        Args:
            before: the workers that hold each part.
            after: the workers that need each part.
            now: the layout before the cut.
            then: the layout after it.
        """
        tensors = self.net.outline.state.tensors
        buffers = {
            (self.net.name, name)
            for name, x in tensors.items()
            if not isinstance(x, nn.Parameter)
        }
        everyone = frozenset(range(self._context.world.world_size))
        replicas = [(frozenset(range(now.num_devices)), everyone)]
        if now.num_replicas == then.num_replicas:
            size = now.num_devices
            ranks = [
                frozenset(range(i, i + size)) for i in range(0, len(everyone), size)
            ]
            replicas = list(zip(ranks, ranks, strict=True))
        groups = [(everyone, everyone, after.keys() - buffers)]
        groups += [(holders, needing, buffers) for holders, needing in replicas]
        return [
            move
            for holders, needing, keys in groups
            for move in plan_moves(
                {key: before[key] & holders for key in before.keys() & keys},
                {key: after[key] & needing for key in after.keys() & keys},
                self.net.num_bytes(),
                self._context.world.hosts,
            )
        ]

    def _plan(
        self,
        before: Plan,
        chosen: Prediction,
        order: Schedule,
        modules: Sequence[StageModule],
        num_frozen_layers: int,
    ) -> Plan:
        layers = self.net.outline.layers
        model = self.costs_of(num_frozen_layers)
        costs = model.costs(chosen.boundaries, chosen.prefix_s)
        return replace(
            before,
            boundaries=chosen.boundaries,
            stage_names=tuple(layers[i].name for i in (0, *chosen.boundaries)),
            state_names=tuple(tuple(saved_tensors(module)) for module in modules),
            schedule=order,
            costs=costs,
            predicted=simulate(order, costs),
        )

    def _executor(
        self, plan: Plan, modules: Sequence[StageModule], context: WorkerContext
    ) -> Executor:
        job = self.job
        play_plan = plan_to_play(
            plan.schedule, clips=job.training.clip_norm is not None
        )
        setup = NetSetup(
            plan.schedule.program.nets[0].name,
            modules,
            job.parameter_names,
            job.loss,
            job.training,
            num_frozen=sum(not x.trainable for x in plan.schedule.program.stages),
            tensors=job.tensors,
        )
        watch = MemoryWatch(
            plan.schedule, plan.costs, context.world, context.layout.device
        )
        return make_executor(
            play_plan,
            (setup,),
            PointToPoint(play_plan, context),
            seed=job.seed,
            on_error=watch.on_error,
            is_cut_again=True,  # each part has moved from one holder
        )


class RenamedTransport(Transport):
    """Puts a text before the names of channels, and closes only its own ends.

    Args:
        transport: carries the messages; it stays open.
        prefix: another one for each layout.
    """

    def __init__(self, transport: Transport, prefix: str) -> None:
        self.needs_order = transport.needs_order  # type: ignore[misc]
        self._transport = transport
        self._prefix = prefix
        self._ends: list[Sender | Receiver] = []

    def plan(self, groups: Sequence[Sequence[Post]]) -> None:
        """See `Transport.plan`."""
        self._transport.plan(groups)

    def post_planned(self, *, rest: bool = False) -> None:
        """See `Transport.post_planned`."""
        self._transport.post_planned(rest=rest)

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        return self._kept(self._transport.sender(self._renamed(channel)))

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        return self._kept(self._transport.receiver(self._renamed(channel)))

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._transport.trim()

    def close(self) -> None:
        """Close the ends that were made here."""
        while self._ends:
            self._ends.pop().close()

    def _renamed(self, channel: Channel) -> Channel:
        return replace(channel, name=f"{self._prefix}{channel.name}")

    def _kept(self, end: _End) -> _End:
        self._ends.append(end)
        return end


# profile            each layer alone: forward, backward; and its forward once frozen
# dry run            the first layout's stages, all workers at once
# price of a layer   profile x (stages in the dry run / their layers in the profile)
def price_layers(plan: Plan, outline: Captured, balance: Balance) -> Frozen:
    """Return the costs of a net's layers, none of which is frozen yet.

    Args:
        plan: the first layout's, with the profile; its stages' costs say how much
            longer layers take in place, and what updates take and keep.
        outline: the net, without values.
        balance: how stages are cut: see `hocket.PipelineConfig`.
    """
    stages = plan.costs.stages
    grad_bytes = sum(cost.gradient_bytes for cost in stages) or 1
    state = sum(cost.optimizer_bytes for cost in stages) / grad_bytes
    touched = sum(2 * x.gradient_bytes + x.optimizer_bytes for x in stages) or 1
    states = {n: round(state * x.nbytes) for n, x in outline.state.trained.items()}
    pairs = zip(plan.profile.layers, layer_weights(outline, states), strict=True)
    layers = [replace(measured, weights=weights) for measured, weights in pairs]
    rate = sum(cost.update_s for cost in stages) / touched
    alone = stage_costs(
        layers, plan.boundaries, recomputes=False, update_s_per_byte=rate
    )
    in_place = StageSlowdown.of(stages, alone)
    return Frozen(
        [in_place.of_layer(layer) for layer in layers],
        0,
        rate,
        replace(plan.costs, stages=(), links=()),
        [in_place.forward * forward_s for forward_s in plan.frozen_s],
        sizes=outline.parameters_in_millions if balance == "greedy" else None,
    )


# [a b] │ [c] d │ e f       frozen: a b c
#         rate    rate ─▶   the last device always trains, and broadcasts
def learning_rate(now: PlayedLayout, world: World) -> float:
    """Return the learning rate of the last update; every worker must call this."""
    updaters = now.executor.updaters.values()
    own = next((x.rates()[0] for x in updaters if x.rates()), 0.0)
    return own if _all_train(now) else float(_of_last(now, world, own))


def common_state(now: PlayedLayout, world: World) -> CommonState | None:
    """Return the optimizer's options and the schedule; every worker must call this.

    Raises:
        CheckpointError: an optimizer or a schedule keeps functions in its options.
    """
    own = CommonState.of(now.executor.updaters.values())
    if _all_train(now):
        return own
    tensors: dict[str, Tensor] = {}
    known = None if own is None else [[*own.groups], own.schedule]
    state = encode(known, "the learning-rate schedule", tensors)
    values = {name: [str(x.dtype), x.tolist()] for name, x in tensors.items()}
    state, values = _of_last(now, world, [state, values])
    if own is not None:
        return own

    def tensor(name: str, on_host: bool) -> Tensor:
        dtype, value = values[name]
        kind = getattr(torch, dtype.removeprefix("torch."))
        found = torch.tensor(value, dtype=kind)
        return found if on_host else found.to(world.device)

    return CommonState(*decode(state, tensor))


def _all_train(now: PlayedLayout) -> bool:
    program = now.plan.schedule.program
    training = {stage.device for stage in program.stages if stage.trainable}
    return len(training) == program.num_devices


def _of_last(now: PlayedLayout, world: World, value: Any) -> Any:
    last = now.layout.num_devices - 1  # of the first replica
    return world.broadcast_json(value, last, "the state of updates")
