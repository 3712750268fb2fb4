"""Updates all nets at the end of an emulated step: clip, optimizers, followers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from hocket.core.program import Program
from hocket.run.engine.emulator.net import EmulatedNet
from hocket.run.engine.programs.by_net import check_optimizer
from hocket.run.weights.follower import Follower, Pairs, follow
from hocket.run.weights.momentum import FollowerUpdate
from hocket.run.weights.settings import OptimizerFactory, TrainingConfig
from hocket.run.weights.updater import Updater


class Updates:
    """Updates all weights of a program.

    Args:
        program: the whole.
        nets: by name.
        optimizers: the optimizer, or the `Momentum` or `CopyEvery`, of each net.
        settings: the training settings of each trained net.
        clip_norm: the most that the gradients of one gate may measure together. The
            stages of one delay are one gate.

    Raises:
        ConfigError: a net that moves has no optimizer of its kind, or one that does not
            move has one.
        ModelError: a net follows another one that has no parameter of some name.
    """

    def __init__(
        self,
        program: Program,
        nets: Mapping[str, EmulatedNet],
        optimizers: Mapping[str, OptimizerFactory | FollowerUpdate],
        settings: Mapping[str, TrainingConfig],
        clip_norm: float | None,
    ) -> None:
        self._nets = nets
        self._clip_norm = clip_norm
        self._updaters: list[tuple[int, Updater]] = []  # with the delay of its stage
        self._followers: list[Follower] = []
        for name, net in nets.items():
            check_optimizer(program, name, optimizers.get(name))
            if name in settings:
                self._updaters += _updaters(program, net, settings[name])
        for name, net in nets.items():
            update = optimizers.get(name)
            if isinstance(update, FollowerUpdate):
                self._followers += _followers(program, nets, net, update)

    def update(self, step: int) -> None:
        """Update all weights, once all gradients are complete."""
        weights = [w for net in self._nets.values() for w in net.weights.items()]
        for _, weight in weights:
            weight.take_gradient()
        self._clip()
        predicted: dict[int, Tensor] = {}
        for _, updater in self._updaters:
            for name, value in (updater.predicted() or {}).items():
                predicted[id(updater.parameters[name])] = value
        for _, weight in weights:
            weight.keep(predicted.get(id(weight.parameter)))
        frozen = [x.parameter for net in self._nets.values() for x in net.frozen]
        before = [parameter.detach().clone() for parameter in frozen]
        for _, updater in self._updaters:
            updater.update()
        for parameter, value in zip(frozen, before, strict=True):
            parameter.detach().copy_(value)  # corrections go on without a gradient
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
            updater = Updater(_owned(net, i), settings, delay=stage.delay)
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
        for replica in range(1, program.num_replicas):
            pairs = follower.buffers
            for other in nets.values():
                own = other.in_set(replica, pairs.own)
                pairs = Pairs(own, other.in_set(replica, pairs.followed))
            yield Follower(update, Pairs(), pairs)
