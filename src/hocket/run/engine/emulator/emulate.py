"""Trains any program in one process; every run of the program must equal it.

Stage s computes step t with the weights after `max(0, t - delay)` updates, and its
gradient is applied to the newest:

    step            0    1    2    3            W(t+1) = W(t) - lr * g(W(t - delay))
    delay 0 reads   W0   W1   W2   W3
    delay 1 reads   W0   W0   W1   W2           WPipe: 1 in front, 0 behind
    delay 2 reads   W0   W0   W0   W1           2BW: 1 everywhere

A weight that stages share has the largest of their delays, in all of them. The first
stage of that delay updates it, with the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from hocket.core.program import Program
from hocket.model.trace.example import Example
from hocket.run.data.batch import Microbatch, form_of, split_batch, to_capture
from hocket.run.engine.emulator.batch import Step, gradient_groups
from hocket.run.engine.emulator.net import (
    CPU,
    EmulatedNet,
    EmulatedStages,
    example_output,
    leaves_of,
    make_net,
)
from hocket.run.engine.programs.by_net import (
    ByNet,
    NetArguments,
    arguments_by_net,
    net_inputs,
    nets_in_order,
)
from hocket.run.engine.programs.net_setup import stages_of, whole_batch_sources
from hocket.run.engine.programs.part_sizes import part_sizes
from hocket.run.stage.net_output import example_of
from hocket.run.stage.seed import preserve_generators
from hocket.run.weights.follower import Follower, Pairs, follow
from hocket.run.weights.momentum import FollowerUpdate
from hocket.run.weights.settings import (
    OptimizerFactory,
    SchedulerFactory,
    TrainingConfig,
)
from hocket.run.weights.updater import Updater

Losses = dict[str, float]


def emulate(
    program: Program,
    models: ByNet[nn.Module],
    losses: ByNet[Callable[..., Any]],
    optimizers: ByNet[OptimizerFactory | FollowerUpdate],
    batches: Iterable[Any],
    freeze_at: Mapping[int, str | int]
    | Mapping[str, Mapping[int, str | int]]
    | None = None,
    *,
    cut_at: Sequence[str] | Mapping[str, Sequence[str]] = (),
    schedulers: ByNet[SchedulerFactory] | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Train the nets of a program in this process, one microbatch after the other.

    Where an argument is a mapping by net, a program of one net takes the bare object.

    An output that flows to another net's last stage goes to its loss, behind the
    targets: `loss(output, targets, *outputs)`. One that flows to its first stage comes
    before the model's own inputs, leaf by leaf. A loss over the whole batch is called
    once per replica, or once over all replicas, with the outputs of all microbatches
    joined along dimension 0.

    Nets that are copies of one another are one net here, under the name of the first:
    the microbatches of a step are shared out over the copies in order.

    Nets that are trained run in training mode; all others in the mode that the model is
    in. The numbers of updates in `program.num_steps` are not looked at: each batch is a
    step.

    Args:
        program: what to compute: nets, stages, flows, delays, replicas.
        models: on the CPU; they are trained in place.
        losses: the loss of each net that ends in one.
        optimizers: the optimizer of each trained net, as for `Pipeline`: called once
            per stage; a `Momentum` or a `CopyEvery` for each net that follows another
            one.
        batches: one per step: a pair `(inputs, targets)` for all nets, or a mapping of
            pairs by net. Each is cut into the net's microbatches of all replicas.
        freeze_at: by step, how many layers are frozen from then on, as a policy of
            `freeze=` without `layers` counts them; or the first module that trains.
            What is frozen has no gradient and no update, reads its newest weights, and
            runs in evaluation mode. Where fewer layers are frozen at a later step (0,
            or the model's first module: all train), what trains again begins with an
            optimizer state of nothing.
        cut_at: the modules with which the stages of a net but the first begin, such as
            `pipeline.plan.stage_names[1:]`.
        schedulers: as for `Pipeline`; each stage's is stepped once per step.
        clip_norm: the most that the gradients of one gate may measure together: of all
            stages of one delay.
        seed: as for `Pipeline`: of the random numbers in forwards.

    Returns:
        The losses of each step, by name, weighted by samples; by net and name where the
        program has several nets.

    Raises:
        ConfigError: a net lacks a model, a loss or an optimizer; or freeze_at has
            another form, or freezes more layers than can.
        ShapeError: a net is cut into other numbers of stages than the program has.
        ModelError: a model cannot be cut so; a flow leads to where no output of another
            net can go; or a forward that reads old weights begins a checkpoint.
        DataError: as for `Pipeline.step`.
    """
    given = NetArguments.of(
        program,
        models,
        losses,
        optimizers,
        cut_at=cut_at,
        schedulers=schedulers,
        clip_norm=clip_norm,
    )
    program, names = given.merged.program, given.names
    freezes = arguments_by_net(freeze_at or {}, names, "freeze_at", depth=2)
    plans = [
        EmulatedStages(
            name,
            stages_of(program, name),
            *net_inputs(program, name, has_loss=name in given.losses),
            whole_batch_sources(program, name),
            tuple(given.cuts.get(name, ())),
            freezes.get(name, {}),
            given.merged.shares[name],
            program.num_pipelines,
        )
        for name in nets_in_order(program, names)
    ]
    history: list[dict[str, Losses]] = []
    nets: dict[str, EmulatedNet] = {}
    updates: _Updates | None = None
    forms: dict[str, Example | None] = {}
    sizes = part_sizes(program)
    facts = {net.name: net for net in program.nets}
    with preserve_generators(CPU):
        for number, batch in enumerate(batches):
            by_net = isinstance(batch, Mapping)
            pairs = {name: batch[name] if by_net else batch for name in names}
            parts = {
                name: split_batch(
                    pairs[name],
                    facts[name].num_microbatches * program.num_pipelines,
                    forms.get(name),
                    sizes_of=sizes[name],
                )
                for name in names
            }
            if updates is None:
                forms = {name: form_of(pair) for name, pair in pairs.items()}
                nets = _make_nets(given, plans, pairs, parts)
                updates = _Updates(given, nets, clip_norm)
            for net in nets.values():
                updates.forget_moments(net.begin(number))
            step = Step(
                nets, facts, given.losses, parts, program.num_pipelines, seed, number
            )
            for group in gradient_groups(program):
                step.run_group(group)
            updates.update(number)
            history.append(step.sums)
    return [x[names[0]] for x in history] if len(names) == 1 else history


def _make_nets(
    arguments: NetArguments,
    plans: Sequence[EmulatedStages],
    pairs: Mapping[str, Any],
    parts: Mapping[str, Sequence[Microbatch]],
) -> dict[str, EmulatedNet]:
    nets: dict[str, EmulatedNet] = {}
    outputs: dict[str, Any] = {}
    for plan in plans:
        (first, *_) = parts[plan.name]
        given = [
            example_of(outputs[source], parts[source][0].num_samples, first.num_samples)
            for source in plan.inputs
        ]
        sizes = tuple(part.num_samples for part in parts[plan.name])
        _, args, kwargs = to_capture(
            arguments.models[plan.name],
            pairs[plan.name],
            len(sizes),
            {sum(sizes): sizes}.__getitem__,
            pytree.tree_leaves(given),
        )
        net = make_net(plan, arguments, args, kwargs, first.targets)
        nets[plan.name] = net
        if any(plan.name in other.inputs for other in plans):
            outputs[plan.name] = example_output(net, leaves_of(given, first))
    return nets


class _Updates:
    """Updates all weights of a program.

    Args:
        arguments: what the nets are made from.
        nets: by name.
        clip_norm: the most that the gradients of one gate may measure together. The
            stages of one delay are one gate.

    Raises:
        ModelError: a net follows another one that has no parameter of some name.
    """

    def __init__(
        self,
        arguments: NetArguments,
        nets: Mapping[str, EmulatedNet],
        clip_norm: float | None,
    ) -> None:
        program = arguments.merged.program
        self._nets = nets
        self._clip_norm = clip_norm
        self._updaters: list[tuple[int, Updater]] = []  # with the delay of its stage
        self._followers: list[Follower] = []
        for name, net in nets.items():
            if name in arguments.settings:
                self._updaters += _updaters(program, net, arguments.settings[name])
        for name, net in nets.items():
            update = arguments.optimizers.get(name)
            if isinstance(update, FollowerUpdate):
                self._followers += _followers(program, nets, net, update)

    def update(self, step: int) -> None:
        """Update all weights, once all gradients are complete."""
        weights = [w for net in self._nets.values() for w in net.weights.items()]
        for _, weight in weights:
            weight.take_gradient()
        self._clip()
        for _, weight in weights:
            weight.keep()
        frozen = [x.parameter for net in self._nets.values() for x in net.frozen]
        before = [parameter.detach().clone() for parameter in frozen]
        for _, updater in self._updaters:
            updater.update()
        for parameter, value in zip(frozen, before, strict=True):
            parameter.detach().copy_(value)  # an optimizer may go on without a gradient
        for follower in self._followers:
            follower.update(step)

    def forget_moments(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop the optimizers' state of parameters that train again."""
        for _, updater in self._updaters:
            for parameter in parameters:
                if updater.optimizer is not None:
                    updater.optimizer.state.pop(parameter, None)

    def _clip(self) -> None:
        if self._clip_norm is None:
            return
        for delay in {delay for delay, _ in self._updaters}:
            gate = [
                x
                for d, updater in self._updaters
                if d == delay
                for x in updater.parameters.values()
            ]
            nn.utils.clip_grad_norm_(gate, self._clip_norm)


def _updaters(
    program: Program, net: EmulatedNet, settings: TrainingConfig
) -> list[tuple[int, Updater]]:
    """Make the updater of each trained stage; return it behind the stage's delay."""
    found = []
    for i, number in enumerate(net.plan.stages):
        stage = program.stages[number]
        if stage.trainable:
            updater = Updater(_owned(net, i), settings)
            found.append((stage.delay, updater))
    return found


def _owned(net: EmulatedNet, place: int) -> dict[str, nn.Parameter]:
    """Return the parameters that one stage of a net updates."""
    held = net.modules[place].named_parameters()
    return {name: p for name, p in held if net.owners[name] == place}


def _followers(
    program: Program,
    nets: Mapping[str, EmulatedNet],
    net: EmulatedNet,
    update: FollowerUpdate,
) -> Iterator[Follower]:
    """Yield the follower of each stage that follows others.

    Buffers have a further one for each further replica.
    """
    modules = {
        number: module
        for other in nets.values()
        for number, module in zip(other.plan.stages, other.modules, strict=True)
    }
    for i, (number, module) in enumerate(
        zip(net.plan.stages, net.modules, strict=True)
    ):
        others = program.stages[number].follows
        if not others:
            continue
        where = f"stage {number} of net {net.plan.name}"
        held = {other: modules[other] for other in others}
        follower = follow(update, module, _owned(net, i), held, where)
        yield follower
        for replica in range(1, program.num_pipelines):
            pairs = follower.buffers
            for other in nets.values():
                own = other.in_set(replica, pairs.own)
                pairs = Pairs(own, other.in_set(replica, pairs.followed))
            yield Follower(update, Pairs(), pairs)
