"""The updates at the end of an emulated step: clipping, optimizers, momentum."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hocket.core.program import Program
from hocket.run.engine.emulator.net import EmulatedNet
from hocket.run.engine.programs.by_net import check_optimizer
from hocket.run.weights.momentum import Follower, Momentum, follow
from hocket.run.weights.settings import OptimizerFactory, TrainingConfig
from hocket.run.weights.updater import Updater


class Updates:
    """Updates all weights of a program.

    Args:
        program: the whole.
        nets: by name.
        optimizers: what updates are made with, by net.
        settings: how each trained net is trained, and with which schedule.
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
        optimizers: Mapping[str, OptimizerFactory | Momentum],
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
            momentum = optimizers.get(name)
            if isinstance(momentum, Momentum):
                self._followers.append(_follower(program, nets, net, momentum))

    def update(self, step: int) -> None:
        """Update everything, once its gradients are there."""
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
    """Of each trained stage, with its delay."""
    found = []
    for i, (number, held) in enumerate(zip(net.plan.stages, net.held, strict=True)):
        stage = program.stages[number]
        if stage.trainable:
            own = {name: p for name, p in held.items() if net.owners[name] == i}
            found.append((stage.delay, Updater(own, settings, delay=stage.delay)))
    return found


def _follower(
    program: Program,
    nets: Mapping[str, EmulatedNet],
    net: EmulatedNet,
    momentum: Momentum,
) -> Follower:
    held = {
        number: parameters
        for other in nets.values()
        for number, parameters in zip(other.plan.stages, other.held, strict=True)
    }
    own: dict[str, Tensor] = {}
    followed: dict[str, Tensor] = {}
    for number in net.plan.stages:
        others = program.stages[number].follows
        if others:
            where = f"stage {number} of net {net.plan.name}"
            stage = follow(momentum, held[number], {x: held[x] for x in others}, where)
            own |= stage.own
            followed |= stage.followed
    return Follower(momentum, own, followed)
