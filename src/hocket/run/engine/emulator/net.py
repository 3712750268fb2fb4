"""Runs one net of the emulator: its stages in a chain.

Where `freeze_at` freezes a part of a stage, the stage is cut there, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError
from hocket.freeze.policy import is_whole
from hocket.model.capture.capture import Captured, capture
from hocket.model.capture.no_checkpointing import around_old_weights
from hocket.model.stages.cut import boundaries_from_names, cut
from hocket.model.stages.parameter_paths import Home
from hocket.model.stages.stage import StageModule
from hocket.model.trace.state import overwrite
from hocket.run.data.batch import Microbatch
from hocket.run.engine.programs.by_net import NetArguments
from hocket.run.engine.programs.loss_state import with_loss
from hocket.run.engine.programs.net_setup import cut_net
from hocket.run.nets.freezable import freezable_modules, frozen_edges
from hocket.run.stage.recompute import changing_buffers
from hocket.run.stage.seed import layers_seeded
from hocket.run.stage.versions import ParameterSlots

# Runs a part of a net in the emulator, with the old weights that its delay promises.
#
# Old weights are leaves of their own, which `torch.func.functional_call` uses instead
# of the stage's: what autograd saved of them stays valid after updates.


@dataclass(slots=True)
class Weight:
    """A parameter that is updated, and its old values that forwards still read.

    Args:
        parameter: the newest value.
        delay: by how many updates forwards read an older one.
        old: its values before each of the last `delay` updates, the oldest first;
            leaves.
        is_frozen: whether it has no updates now.
    """

    parameter: nn.Parameter
    delay: int
    old: deque[Tensor] = field(default_factory=deque)
    is_frozen: bool = False

    def take_gradient(self) -> None:
        """Move the gradient of the old value that was read to the newest."""
        if self.old:
            self.parameter.grad, self.old[0].grad = self.old[0].grad, None

    def keep(self) -> None:
        """Keep the value before an update, and drop those that are too old."""
        if not self.delay or self.is_frozen:
            return
        self.old.append(self.parameter.detach().clone().requires_grad_())
        if len(self.old) > self.delay:
            self.old.popleft()

    def freeze(self) -> None:
        """Let forwards read the newest value from now on."""
        self.is_frozen = True
        self.old.clear()


@dataclass(slots=True)
class Segment:
    """Some layers of one stage, which are frozen together.

    Args:
        module: the layers, with the newest weights.
        begin: the number of the first layer.
        weights: the parameters that are updated, by name.
        is_trainable: whether its stage is trained at all.

    Attributes:
        trains: whether gradients flow through it now.
    """

    module: StageModule
    begin: int
    weights: Mapping[str, Weight]
    is_trainable: bool
    trains: bool = field(init=False)

    def __post_init__(self) -> None:
        self.trains = self.is_trainable

    def __call__(self, *values: Tensor) -> Any:
        """Compute it with the weights that its delay promises."""
        with torch.set_grad_enabled(self.trains):
            # Each place once: torch puts back what it found, and in a place that it
            # fills twice (a module with two names) it finds what it put there.
            leaves = {place: w.old[0] for place, w in self._places() if w.old}
            if not leaves:
                return self.module(*values)
            with around_old_weights(max(x.delay for x in self.weights.values())):
                return functional_call(self.module, leaves, values, tie_weights=False)

    def _places(self) -> Iterator[tuple[str, Weight]]:
        """Yield each place in the modules of a parameter that is updated."""
        weights = {id(x.parameter): x for x in self.weights.values()}
        for path, module in self.module.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in weights:
                    yield f"{path}.{key}" if path else key, weights[id(parameter)]


CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class EmulatedStages:
    """The stages of one net, and what flows into them.

    Args:
        name: the net.
        stages: its stages, by their numbers in the program.
        inputs: the nets whose outputs come before the model's own inputs.
        loss_inputs: the nets whose outputs the loss reads.
        whole_loss_inputs: those of them of which it reads the whole batch.
        cut_at: the modules with which its stages but the first begin.
        freeze_at: by step, the first module that still trains, or how many layers are
            frozen.
        shares: the microbatches of each copy of the net in a replica; each copy of
            each replica has buffers of its own.
        num_replicas: the replicas of the program.

    Raises:
        ConfigError: freeze_at has another form.
    """

    name: str
    stages: tuple[int, ...]
    inputs: tuple[str, ...]
    loss_inputs: tuple[str, ...]
    whole_loss_inputs: frozenset[str]
    cut_at: tuple[str, ...]
    freeze_at: Mapping[int, str | int]
    shares: tuple[int, ...]
    num_replicas: int

    def __post_init__(self) -> None:
        given: object = self.freeze_at
        if not isinstance(given, Mapping) or not all(
            is_whole(step, 0) and (isinstance(first, str) or is_whole(first, 0))
            for step, first in given.items()
        ):
            raise ConfigError(
                f"freeze_at of net {self.name} is {given!r:.200}: give the number of "
                "frozen layers by step, as {200: 4}, or the first module that trains, "
                "as {200: 'blocks.4'}"
            )

    def buffer_set(self, number: int) -> int:
        """Return the number of the buffers that a microbatch reads and changes.

        Microbatches are counted over all replicas.
        """
        replica, rest = divmod(number, sum(self.shares))
        ends = accumulate(self.shares)
        return replica * len(self.shares) + sum(rest >= end for end in ends)


@dataclass(slots=True)
class EmulatedNet:
    """A captured and cut net, with its current weights and buffers.

    Args:
        plan: its stages, and what flows into them.
        modules: each stage, with the newest weights.
        owners: the stage that updates each parameter.
        weights: the parameters that move, by name.
        segments: the whole net, in order.
        frozen_layers: by step, how many layers at the front are frozen from then on.
        buffers: where the buffers that training changes are kept, and what is there
            for each copy and replica but the first.
        frozen: the weights that only frozen layers use.
    """

    plan: EmulatedStages
    modules: Sequence[StageModule]
    owners: Mapping[str, int]
    weights: Mapping[str, Weight]
    segments: Sequence[Segment]
    frozen_layers: Mapping[int, int]
    buffers: tuple[tuple[Home, ...], list[list[Tensor]]]
    frozen: list[Weight] = field(default_factory=list)

    def forward(self, leaves: Sequence[Any], seed: int, step: int, number: int) -> Any:
        """Return the model's output for one microbatch.

        Args:
            leaves: its arguments.
            seed: the run's seed.
            step: from 0.
            number: the microbatch, counted over all copies and replicas.
        """
        values: Any = ()
        with self._buffers_of(self.plan.buffer_set(number)):
            for segment in self.segments:
                module = segment.module
                own = [leaves[i] for i in module.batch_inputs]
                with layers_seeded(module, CPU, seed, step, self.plan.name, number):
                    values = segment(*values, *own)
        return values

    @contextmanager
    def around_loss(self, number: int) -> Iterator[None]:
        """Let a loss with weights of its own read those that the last stage reads.

        Args:
            number: the microbatch, counted over all copies and replicas.
        """
        last = self.segments[-1]
        old = {name: w.old[0] for name, w in last.weights.items() if w.old}
        slots = ParameterSlots(last.module, {n: last.weights[n].parameter for n in old})
        with self._buffers_of(self.plan.buffer_set(number)), slots.filled(old):
            yield

    def begin(self, step: int) -> list[nn.Parameter]:
        """Freeze the layers that `freeze_at` names for this step.

        Returns:
            The parameters that train again from this step on.
        """
        num_layers = self.frozen_layers.get(step)
        if num_layers is None:
            return []
        for segment in self.segments:
            is_frozen = segment.begin < num_layers
            segment.trains = segment.is_trainable and not is_frozen
            # Frozen, its statistics stay, and nothing is dropped.
            segment.module.train(not is_frozen)
        training = {n for x in self.segments if x.trains for n in x.weights}
        self.frozen = [w for n, w in self.weights.items() if n not in training]
        again = [w for n, w in self.weights.items() if n in training and w.is_frozen]
        for weight in again:
            weight.is_frozen = False
        for weight in self.frozen:
            weight.freeze()
        return [weight.parameter for weight in again]

    def in_set(self, chosen: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace buffers of the first set by those of another one.

        Args:
            chosen: the other set's number, above 0.
            tensors: buffers of any net, by name.
        """
        homes, sets = self.buffers
        others = zip(homes, sets[chosen - 1], strict=True)
        found = {id(home[key]): x for (home, key), x in others}
        return {name: found.get(id(x), x) for name, x in tensors.items()}

    @contextmanager
    def _buffers_of(self, chosen: int) -> Iterator[None]:
        homes, sets = self.buffers
        if chosen == 0:
            yield
            return
        first = [home[key] for home, key in homes]
        _put(homes, sets[chosen - 1])
        try:
            yield
        finally:
            sets[chosen - 1] = [home[key] for home, key in homes]
            _put(homes, first)


def make_net(
    plan: EmulatedStages,
    arguments: NetArguments,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: Any,
) -> EmulatedNet:
    """Capture a model and cut it.

    Args:
        plan: its stages, and what flows into them.
        arguments: the program, and the model and the loss of each net.
        args: the positional arguments of one microbatch.
        kwargs: its keyword arguments.
        targets: those of the microbatch.

    Raises:
        ModelError: the model cannot be captured, or cut so.
        ShapeError: there are other numbers of stages than the program has.
        ConfigError: more layers freeze than can.
    """
    program, model = arguments.merged.program, arguments.models[plan.name]
    loss = arguments.losses.get(plan.name)
    modules: tuple[str, ...] = ()
    if any(not isinstance(first, str) for first in plan.freeze_at.values()):
        modules = freezable_modules(model, None)
    captured = capture(model, args, kwargs, cut=(*plan.cut_at, *modules[1:]))
    if loss is not None:
        captured = with_loss(captured, loss, targets)
    stages = cut_net(program, plan.name, captured, plan.cut_at)
    boundaries = boundaries_from_names(captured, plan.cut_at)
    held = [dict(stage.named_parameters()) for stage in stages]
    facts = [program.stages[stage] for stage in plan.stages]
    owners = _owners(held, [stage.delay for stage in facts])
    weights = {
        name: Weight(parameter, facts[owners[name]].delay)
        for parameters, stage in zip(held, facts, strict=True)
        for name, parameter in parameters.items()
        if stage.follows or (stage.trainable and parameter.requires_grad)
    }
    frozen_layers = _frozen_layers(captured, plan.freeze_at, modules)
    edges = sorted({*boundaries, *frozen_layers.values()} - {0})
    segments = _segments(captured, edges, boundaries, facts, weights)
    homes = tuple(h for x in segments for h in changing_buffers(x.module))
    sets = [_copies(homes) for _ in range(plan.num_replicas * len(plan.shares) - 1)]
    return EmulatedNet(
        plan, stages, owners, weights, segments, frozen_layers, (homes, sets)
    )


def example_output(net: EmulatedNet, leaves: Sequence[Any]) -> Any:
    """Return an output to capture other nets with; buffers stay as they are."""
    homes, _ = net.buffers
    before = [home[key] for home, key in homes]
    copies = [x.detach().clone() for x in before]
    with torch.no_grad():
        out = net.forward(leaves, 0, 0, 0)
    for x, copy in zip(before, copies, strict=True):
        overwrite(x, copy)
    _put(homes, before)
    return out


def leaves_of(net_outputs: Sequence[Any], part: Microbatch) -> list[Any]:
    """Return a model's arguments: other nets' outputs, then the batch's."""
    return [*pytree.tree_leaves(list(net_outputs)), *part.leaves]


def _copies(homes: Sequence[Home]) -> list[Tensor]:
    """Copy each buffer; one that is kept in two places is copied once."""
    once = {id(home[key]): home[key].detach().clone() for home, key in homes}
    return [once[id(home[key])] for home, key in homes]


def _put(homes: Sequence[Home], values: Sequence[Tensor]) -> None:
    for (home, key), value in zip(homes, values, strict=True):
        home[key] = value


def _owners(
    held: Sequence[Mapping[str, nn.Parameter]], delays: Sequence[int]
) -> dict[str, int]:
    """Return the stage that updates each weight: the first of the largest delay."""
    owners: dict[str, int] = {}
    for i, parameters in enumerate(held):
        for name in parameters:
            if name not in owners or delays[i] > delays[owners[name]]:
                owners[name] = i
    return owners


def _frozen_layers(
    captured: Captured, freeze_at: Mapping[int, str | int], modules: Sequence[str]
) -> dict[int, int]:
    """Return, by step, the place of the first layer that still trains.

    Args:
        captured: the model.
        freeze_at: see `EmulatedStages`.
        modules: the modules that count as layers, where it has numbers.

    Raises:
        ConfigError: a number is larger than that of the layers that can freeze.
    """
    edges = (0, *frozen_edges(captured, modules)) if modules else ()
    names = (*captured.layers[0].modules, captured.layers[0].name)
    found = {}
    for step, first in freeze_at.items():
        if isinstance(first, str):
            is_all = first in names
            found[step] = 0 if is_all else boundaries_from_names(captured, [first])[0]
        elif first < len(edges):
            found[step] = edges[first]
        else:
            raise ConfigError(
                f"freeze_at freezes {first} layers at step {step}, and "
                f"{len(edges) - 1} can freeze: {', '.join(modules[: len(edges) - 1])}"
            )
    return found


def _segments(
    captured: Captured,
    edges: Sequence[int],
    boundaries: Sequence[int],
    facts: Sequence[Any],
    weights: Mapping[str, Weight],
) -> list[Segment]:
    trains = any(stage.trainable for stage in facts)
    segments = []
    for module, begin in zip(cut(captured, edges), (0, *edges), strict=True):
        stage = facts[sum(boundary <= begin for boundary in boundaries)]
        module.train(trains or captured.model.training)
        names = [name for name, _ in module.named_parameters()]
        moving = {name: weights[name] for name in names if name in weights}
        segments.append(Segment(module, begin, moving, stage.trainable))
    return segments
