"""One net of a program, captured and cut, as workers are set up from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hocket.core.program import Program
from hocket.errors import ShapeError
from hocket.model.capture.captured import Captured
from hocket.model.profile.measure import restored_model
from hocket.model.stages.cut import boundaries_from_names, cut
from hocket.model.stages.stage import StageModule
from hocket.run.data.loss import LossFunction
from hocket.run.stage.loss_checks.reads import ModelTensors
from hocket.run.stage.net_output import NetOutput
from hocket.run.weights.momentum import FollowerUpdate
from hocket.run.weights.settings import TrainingConfig


@dataclass(frozen=True, slots=True)
class NetSetup:
    """One net of a program.

    Args:
        name: the net's name in the program.
        modules: all of its stages.
        parameter_names: the uncut model's names, in its order.
        loss: the loss of its outputs; None where other nets read them.
        settings: how it is trained; None for other nets.
        follows: how it follows another net; None where it does not.
        training: whether it runs in training mode.
        seed_name: its name in seeds of random numbers.
        others: the forms of other nets' outputs that a stage reads, by the stage's
            number in the program.
        output: its own form, where other nets or a loss over the whole batch read it.
        saved_prefix: as for `StageRunner`.
        num_frozen: its first stages that run in evaluation mode all the same: they were
            frozen while training ran.
        tensors: the uncut model's, which its loss must not read; None: not looked at.
    """

    name: str
    modules: Sequence[StageModule]
    parameter_names: Sequence[str]
    loss: LossFunction | None
    settings: TrainingConfig | None
    follows: FollowerUpdate | None = None
    training: bool = True
    seed_name: str = "model"
    others: Mapping[int, tuple[NetOutput, ...]] = field(default_factory=dict)
    output: NetOutput | None = None
    saved_prefix: str | None = ""
    num_frozen: int = 0
    tensors: ModelTensors | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all stages, in the uncut model's order."""
        found = {n: p for x in self.modules for n, p in x.named_parameters()}
        return {name: found[name] for name in self.parameter_names if name in found}


def training_of(nets: Iterable[NetSetup]) -> TrainingConfig:
    """Return how the nets are trained; they may differ in their optimizers alone."""
    return next(net.settings for net in nets if net.settings is not None)


def stages_of(program: Program, net: str) -> tuple[int, ...]:
    """Return the stages of a net, by their numbers in the program."""
    return tuple(i for i, stage in enumerate(program.stages) if stage.net == net)


def cut_net(
    program: Program, name: str, captured: Captured, cut_at: Sequence[str]
) -> tuple[StageModule, ...]:
    """Cut the model of a net into its stages.

    Args:
        program: the whole.
        name: the net.
        captured: its model.
        cut_at: the modules with which its stages but the first begin.

    Raises:
        ShapeError: there are other numbers of stages than the program has.
        ModelError: the model cannot be cut so.
    """
    numbers = stages_of(program, name)
    if len(numbers) != len(cut_at) + 1:
        raise ShapeError(
            f"cut_at makes {len(cut_at) + 1} stages of net {name}, the program has "
            f"{len(numbers)}: name the modules with which the stages but the first "
            "begin"
        )
    places = {number: i for i, number in enumerate(numbers)}
    flows = [(places[a], places[b]) for a, b in program.flows if {a, b} <= {*places}]
    return cut(captured, boundaries_from_names(captured, cut_at), flows)


def whole_batch_sources(program: Program, net: str) -> frozenset[str]:
    """Return the nets of whose outputs a net's loss reads the whole batch."""
    flows = program.whole_batch_flows
    stages = program.stages
    return frozenset(stages[a].net for a, b in flows if stages[b].net == net)


def nets_of_batch(program: Program, net: str) -> tuple[str, ...]:
    """Return the nets that share a batch with a net: copies of it, and itself."""
    first = stages_of(program, net)[0]
    return tuple(program.stages[copy].net for copy in sorted(program.copies_of[first]))


def connected_nets(
    program: Program, flows: Iterable[tuple[int, int]]
) -> list[list[str]]:
    """Return the nets in groups, between which there is none of some flows.

    Args:
        program: the whole; each group has its nets in the program's order.
        flows: those of its flows that count.
    """
    group_of = {net.name: [net.name] for net in program.nets}
    for a, b in flows:
        first, second = (group_of[program.stages[stage].net] for stage in (a, b))
        if first is not second:
            first += second
            group_of.update(dict.fromkeys(second, first))
    groups = {id(group): group for group in group_of.values()}
    names = [net.name for net in program.nets]
    return [sorted(group, key=names.index) for group in groups.values()]


def modules_of(program: Program, nets: Iterable[NetSetup]) -> tuple[StageModule, ...]:
    """Return the modules of all stages, in the program's order."""
    found = {
        number: module
        for net in nets
        for number, module in zip(
            stages_of(program, net.name), net.modules, strict=True
        )
    }
    return tuple(found[number] for number in range(program.num_stages))


def example_output(captured: Captured, *, training: bool) -> Any:
    """Return a model's output for the example that it was captured with; on the CPU.

    Args:
        captured: the model.
        training: whether it runs in training mode.
    """
    example = captured.example
    args, kwargs = pytree.tree_unflatten(list(example.leaves), example.spec)
    with restored_model(captured, torch.device("cpu")), torch.no_grad():
        captured.model.train(training)
        output = captured.model(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)


class ParameterNames:
    """Names parameters of all nets: the uncut model's own where one model is trained.

    Args:
        program: says which stages are copies: they share their names.
        nets: all of it.
    """

    def __init__(self, program: Program, nets: Sequence[NetSetup]) -> None:
        self._program = program
        firsts = {net.name: nets_of_batch(program, net.name)[0] for net in nets}
        trained = {firsts[net.name] for net in nets if net.settings is not None}
        self._is_one = len(trained) == 1
        self._firsts = firsts

    def of(self, stage: int, name: str) -> str:
        """Return the name of a stage's parameter."""
        return name if self._is_one else f"{self.net_of(stage)}.{name}"

    def net_of(self, stage: int) -> str:
        """Return a stage's net; of copies, the first."""
        return self._firsts[self._program.stages[stage].net]

    def is_first(self, net: str) -> bool:
        """Whether a net is no copy of one before it."""
        return self._firsts[net] == net
