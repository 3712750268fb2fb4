"""Arguments that are given by net: models, losses, optimizers; and their checks.

A run and the emulator take the same ones, and refuse the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import nn

from hocket.core.program import Program
from hocket.errors import ConfigError, ModelError
from hocket.model.trace.state import refuse_faults
from hocket.run.engine.programs.copies import Merged, without_copies
from hocket.run.engine.programs.net_setup import stages_of
from hocket.run.weights.momentum import FollowerUpdate
from hocket.run.weights.settings import (
    OptimizerFactory,
    SchedulerFactory,
    TrainingConfig,
)

T = TypeVar("T")
ByNet: TypeAlias = T | Mapping[str, T]


def arguments_by_net(
    value: Any, names: Sequence[str], what: str, *, depth: int = 1
) -> dict[str, Any]:
    """Return an argument by net.

    Args:
        value: a mapping by net, or the only net's.
        names: all nets.
        what: the argument's name, for errors.
        depth: how many mappings deep it is by net.

    Raises:
        ConfigError: it names an unknown net; or there are several, and no mapping.
    """
    inner = value
    for _ in range(depth - 1):
        inner = next(iter(inner.values()), {}) if isinstance(inner, Mapping) else inner
    if isinstance(inner, Mapping):
        unknown = [str(name) for name in value if name not in names]
        if unknown:
            raise ConfigError(
                f"{what} names {', '.join(unknown)}; the nets are {', '.join(names)}"
            )
        return dict(value)
    if len(names) > 1:
        raise ConfigError(
            f"{what} must be a mapping by net, for there are {len(names)}: "
            f"{', '.join(names)}"
        )
    return {names[0]: value}


@dataclass(frozen=True, slots=True)
class NetArguments:
    """What a program's nets are made from, checked.

    Args:
        merged: the program without copies.
        names: its nets.
        models: the model of each of them.
        losses: the loss of each net that ends in one.
        optimizers: the update of each net that has one.
        cuts: the modules at which a net is cut; one that is left out has one stage.
        settings: how each trained net is trained.
    """

    merged: Merged
    names: tuple[str, ...]
    models: Mapping[str, nn.Module]
    losses: Mapping[str, Callable[..., Any]]
    optimizers: Mapping[str, OptimizerFactory | FollowerUpdate]
    cuts: Mapping[str, Sequence[str]]
    settings: Mapping[str, TrainingConfig]

    @classmethod
    def of(
        cls,
        program: Program,
        models: ByNet[nn.Module],
        losses: ByNet[Callable[..., Any]],
        optimizers: ByNet[OptimizerFactory | FollowerUpdate],
        *,
        cut_at: Sequence[str] | Mapping[str, Sequence[str]],
        schedulers: ByNet[SchedulerFactory] | None,
        clip_norm: float | None,
    ) -> NetArguments:
        """Sort arguments of `emulate` and of a run by net.

        Args:
            program: with its copies.
            models: as for `emulate`, and so all others.
            losses: see there.
            optimizers: see there.
            cut_at: see there.
            schedulers: see there.
            clip_norm: see there.

        Raises:
            ConfigError: a net lacks a model, a loss or an optimizer, or has one too
                many.
            ModelError: copies are not of whole nets; or a model cannot be traced.
        """
        merged = without_copies(program)
        names = tuple(net.name for net in merged.program.nets)
        model_of = arguments_by_net(models, names, "models")
        refuse_faults(model_of.values())
        loss_of = arguments_by_net(losses, names, "losses")
        optimizer_of = arguments_by_net(optimizers, names, "optimizers")
        check_buffers(program, optimizer_of)
        scheduler_of = arguments_by_net(schedulers or {}, names, "schedulers")
        cuts = arguments_by_net(cut_at, names, "cut_at") if cut_at else {}
        check_flows(merged)
        check_losses(merged.program, names, loss_of)
        for name in names:
            check_optimizer(merged.program, name, optimizer_of.get(name))
            if name not in model_of:
                raise ConfigError(f"net {name} has no model: give models")
        settings = configs_by_net(optimizer_of, scheduler_of, clip_norm=clip_norm)
        return cls(merged, names, model_of, loss_of, optimizer_of, cuts, settings)


def configs_by_net(
    optimizers: Mapping[str, OptimizerFactory | FollowerUpdate],
    schedulers: Mapping[str, SchedulerFactory],
    *,
    clip_norm: float | None,
) -> dict[str, TrainingConfig]:
    """Return how each trained net is trained; nets differ in optimizers and schedulers.

    Args:
        optimizers: the update of each net that has one.
        schedulers: the schedulers of the nets that have one.
        clip_norm: as for `TrainingConfig`.
    """
    return {
        name: TrainingConfig(
            optimizer=optimizer,
            scheduler=schedulers.get(name),
            clip_norm=clip_norm,
        )
        for name, optimizer in optimizers.items()
        if not isinstance(optimizer, FollowerUpdate)
    }


def nets_in_order(program: Program, names: Sequence[str]) -> list[str]:
    """Sort nets by their first stages: a net's inputs are made by nets before it."""
    first = {name: stages_of(program, name)[0] for name in names}
    return sorted(names, key=first.__getitem__)


def net_inputs(
    program: Program, name: str, *, has_loss: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the nets whose outputs are a net's inputs, and those that go to its loss.

    What flows to the last stage goes to the loss, where there is one.

    Raises:
        ModelError: a flow leads from another net to where its output cannot go.
    """
    stages = stages_of(program, name)
    inputs, loss_inputs = [], []
    for source, target in program.flows:
        other = program.stages[source].net
        if target not in stages or other == name:
            continue
        if source != stages_of(program, other)[-1]:
            raise ModelError(
                f"flow {source} -> {target} leaves net {other} in the middle: only the "
                "output of its last stage, which is the model's, goes to other nets"
            )
        if target == stages[-1] and has_loss:
            loss_inputs.append(other)
        elif (source, target) in program.whole_batch_flows:
            raise ModelError(
                f"flow {source} -> {target} reads the whole batch of net {other}, and "
                f"net {name} has no loss there: only a loss can read outputs of other "
                "samples than its own"
            )
        elif target == stages[0]:
            inputs.append(other)
        elif target == stages[-1]:
            raise ModelError(
                f"flow {source} -> {target} leads to the last stage of net {name}, "
                f"which has no loss that could take it: give losses[{name!r}]"
            )
        else:
            raise ModelError(
                f"flow {source} -> {target} leads into the middle of net {name}: an "
                "output of another net goes to the last stage, for the loss, or to the "
                "first, as the model's input"
            )
    return tuple(inputs), tuple(loss_inputs)


def check_flows(merged: Merged) -> None:
    """Refuse flows between nets of which one has copies, and the other has not as many.

    A copy has a part of the batch, and no flow says which part of another net's.

    Args:
        merged: the program without copies.

    Raises:
        ConfigError: there is such a flow.
    """
    program = merged.program
    for a, b in program.flows:
        source, target = (program.stages[stage].net for stage in (a, b))
        if merged.shares[source] != merged.shares[target] and (
            len(merged.shares[source]) > 1 or len(merged.shares[target]) > 1
        ):
            raise ConfigError(
                f"flow {a} -> {b} connects net {source}, whose copies have "
                f"{merged.shares[source]} microbatches, with net {target}, whose "
                f"copies have {merged.shares[target]}: copy both nets alike, or none"
            )


def check_losses(
    program: Program, names: Sequence[str], losses: Mapping[str, Any]
) -> None:
    """Check that the nets at whose ends gradients begin have losses, and no others.

    Raises:
        ConfigError: a net lacks a loss, or has one too many.
    """
    for name in names:
        last = stages_of(program, name)[-1]
        gets_gradient = bool(program.gradient_targets[last])
        if program.stages[last].trainable and not gets_gradient and name not in losses:
            raise ConfigError(f"net {name} is trained and has no loss: give losses")
        if gets_gradient and name in losses:
            raise ConfigError(
                f"net {name} gets its gradient from the nets that its output flows to: "
                f"leave out losses[{name!r}]"
            )


def check_buffers(
    program: Program, optimizers: Mapping[str, OptimizerFactory | FollowerUpdate]
) -> None:
    """Refuse buffers that follow others where the order of ops would change them.

    Args:
        program: with its copies.
        optimizers: the update of each net that has one.

    Raises:
        ConfigError: a net with a delay, or one that follows copies, does not keep its
            own buffers.
    """
    copies = {stage for group in program.copies for stage in group}
    for number, stage in enumerate(program.stages):
        update = optimizers.get(stage.net)
        if not isinstance(update, FollowerUpdate) or update.buffers == "own":
            continue
        where = f"net {stage.net} has buffers={update.buffers!r}"
        if stage.delay:
            raise ConfigError(
                f"{where} and stage {number} of it has delay {stage.delay}: old "
                "versions of buffers are not kept. Give its stages delay 0, or take "
                'buffers="own"'
            )
        if copied := sorted(copies.intersection(stage.follows)):
            raise ConfigError(
                f"{where}, but stage {copied[0]}, which it follows, has copies with "
                'buffers of their own: take replicas (num_replicas), or buffers="own"'
            )


def check_optimizer(
    program: Program, name: str, optimizer: OptimizerFactory | FollowerUpdate | None
) -> None:
    """Check that a net has an optimizer, a follower's update or neither, as it needs.

    Raises:
        ConfigError: it has another.
    """
    stages = [stage for stage in program.stages if stage.net == name]
    follows = isinstance(optimizer, FollowerUpdate)
    if any(stage.trainable for stage in stages):
        if optimizer is None or follows:
            raise ConfigError(f"net {name} is trained: give optimizers[{name!r}]")
    elif any(stage.follows for stage in stages):
        if not follows:
            raise ConfigError(
                f"net {name} follows other stages: give optimizers[{name!r}] = "
                "hocket.Momentum(m) or hocket.CopyEvery(n)"
            )
    elif optimizer is not None:
        raise ConfigError(
            f"net {name} is neither trained nor does it follow another net: leave out "
            f"optimizers[{name!r}]"
        )
