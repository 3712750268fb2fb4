"""A captured model: its graph in both modes, and the layers it can be cut between.

Aligns two traces: training and evaluation are captured separately.

The two differ where the model's code depends on its mode: a dropout is gone, a mask is
made in another way. A cut is right only at the same place in both:

    training     a  b  dropout  c | d        the cut may lie before d, whose partner
    evaluation   a  b           c | d        crosses the same values
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, Final

from torch import fx, nn

from hocket.errors import ModelError
from hocket.model.trace.example import Example
from hocket.model.trace.flow import TraceFlow, flow_of
from hocket.model.trace.layers import (
    Layer,
    alike,
    cheapest_positions,
    first_positions,
    layer_names,
    positions,
    positions_between_modules,
    used_state,
    with_unused,
)
from hocket.model.trace.local import local
from hocket.model.trace.observe import Observation, TensorInfo
from hocket.model.trace.per_sample import PerSample
from hocket.model.trace.sizes import OpenSizes
from hocket.model.trace.state import State
from hocket.model.trace.trace import Trace
from hocket.model.trace.value import SentTensor

_LAYERS_PER_STAGE: Final = 4


@dataclass(frozen=True, slots=True)
class Captured:
    """A model's graph, divided into layers.

    Args:
        model: the user's module; it is neither copied nor changed.
        example: the microbatch it was captured with.
        state: its parameters and buffers.
        layers: the smallest pieces, in order. A cut is admissible before each but the
            first.
        training: the calls in training mode.
        evaluation: the calls in evaluation mode.
        partner_of: the evaluation call for each training call, if there is one.
        starts: per layer, the position in training and in evaluation where it begins.
        places: every position in training at which a cut is admissible, with that in
            evaluation.
        own_starts: where layers begin in training if no others are asked for.
        values: the tensors that cross any admissible cut, by the call that makes each.
        fixed_batch: why only the example's number of samples works; empty if any does.
        trained: the parameters that wanted a gradient.
        as_is: the modules that run as they are in stages that have all of them, in
            place of their captured calls: by path, why; may grow.
        beside: modules that are called on the outputs, by the name that comes before
            theirs in the state: what belongs to a loss.
    """

    model: nn.Module
    example: Example
    state: State
    layers: tuple[Layer, ...]
    training: TraceFlow
    evaluation: TraceFlow
    partner_of: Mapping[fx.Node, fx.Node]
    starts: tuple[tuple[int, int], ...]
    places: Mapping[int, int]
    own_starts: tuple[int, ...]
    values: Mapping[fx.Node, SentTensor]
    fixed_batch: str
    trained: frozenset[str]
    as_is: dict[str, str] = field(default_factory=dict)
    beside: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def any_batch(self) -> bool:
        """Whether stages run with other numbers of samples than the example's."""
        return not self.fixed_batch

    @property
    def right_for(self) -> dict[bool, OpenSizes]:
        """What sizes its stages are right for, by mode (`True` for training)."""
        only = self.example.num_samples if self.fixed_batch else 0
        flows = {True: self.training, False: self.evaluation}
        return {x: replace(flow.trace.open, only=only) for x, flow in flows.items()}

    @property
    def is_current(self) -> bool:
        """Whether `requires_grad` is the same as when it was captured."""
        return self.trained == _trained(self.state)

    @property
    def alike(self) -> list[int]:
        """A number for each layer; layers of the same number do the same work."""
        return alike(self.training, [start for start, _ in self.starts])

    @property
    def parameters_in_millions(self) -> tuple[float, ...]:
        """Each layer's number of parameters; a shared one counts where it is first."""
        seen = set[str]()
        found = []
        for layer in self.layers:
            new = [name for name in layer.parameters if name not in seen]
            found.append(sum(self.state.tensors[name].numel() for name in new) / 1e6)
            seen.update(new)
        return tuple(found)

    @property
    def digest(self) -> str:
        """A digest, equal for equal work on equal shapes; identifies profiles."""
        tensors = self.state.tensors.items()
        state = [(name, tuple(x.shape), str(x.dtype)) for name, x in tensors]
        leaves = [_leaf_text(leaf) for leaf in self.example.leaves]
        text = [str(state), str(leaves), str([layer.name for layer in self.layers])]
        for flow in (self.training, self.evaluation):
            text += [_text(flow.trace, node) for node in flow.trace.calls]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


def captured(
    model: nn.Module,
    example: Example,
    traces: tuple[Trace, Trace],
    seen: tuple[Observation, Observation, Observation],
    fixed_batch: str,
    *,
    between_modules: bool = False,
) -> Captured:
    """Divide a captured model into layers.

    Args:
        model: the user's module.
        example: the example it was captured with.
        traces: the traces of training and of evaluation.
        seen: the observations of training, of training with one sample more, and of
            evaluation.
        fixed_batch: why only the example's number of samples works; empty if any does.
        between_modules: whether a layer begins with every module that is run as it is.

    Raises:
        ModelError: the model returns nothing that it has computed.
    """
    if not traces[0].output.all_input_nodes:
        raise ModelError(
            "the model's forward returned None, or a constant; it must return what it "
            "has computed: is a `return` missing?"
        )
    training, evaluation = flow_of(traces[0], seen[0]), flow_of(traces[1], seen[2])
    partner_of = partners(training, evaluation)
    places = same_places(training, evaluation, partner_of)
    starts = positions(training, places)
    if between_modules:
        between = positions_between_modules(training, places)
        starts = tuple(sorted({*starts, *between}))
    values = _values(training, places, seen[1], example.num_samples)
    both = tuple((start, places.get(start, 0)) for start in starts)
    return Captured(
        model,
        example,
        traces[0].state,
        _layers(training, evaluation, both, values),
        training,
        evaluation,
        partner_of,
        both,
        places,
        starts,
        values,
        fixed_batch,
        _trained(traces[0].state),
    )


def with_more_layers(
    captured: Captured, names: Sequence[str] = (), fewest: int = 0
) -> Captured:
    """Return the same model, divided into more layers.

    Args:
        captured: the model.
        names: modules with which a layer is to begin, if a cut is admissible there.
        fewest: how many layers there are to be, if there are as many places to cut at.
    """
    training = captured.training
    starts = {start for start, _ in captured.starts}
    known = {name for layer in captured.layers for name in (layer.name, *layer.modules)}
    first = first_positions(training)
    wanted = {first[name] for name in names if name not in known and name in first}
    starts |= wanted & captured.places.keys()
    missing = fewest - len(starts)
    if missing > 0:
        more = cheapest_positions(training, captured.places.keys() - starts)
        starts.update(more[:missing])
    if len(starts) == len(captured.starts):
        return captured
    both = tuple((start, captured.places.get(start, 0)) for start in sorted(starts))
    layers = _layers(training, captured.evaluation, both, captured.values)
    return replace(captured, starts=both, layers=layers)


def with_starts(
    captured: Captured,
    starts: Sequence[tuple[int, int]],
    homes: Sequence[Collection[str]] = (),
) -> Captured:
    """Return the same model with its layers at other places.

    Args:
        captured: the model.
        starts: where each begins, in training and in evaluation.
        homes: the state of each layer; what it uses when not given, and what is near.
    """
    values = captured.values
    layers = _layers(captured.training, captured.evaluation, starts, values, homes)
    return replace(captured, starts=tuple(starts), layers=layers)


def with_module(captured: Captured, name: str, module: nn.Module) -> Captured:
    """Return the same model, whose last layer also has the state of another module.

    Args:
        captured: the model, in its final layers.
        name: comes before the names of the module's state.
        module: is called on the outputs, by a loss.
    """
    own, state = State.of(module), captured.state.joined(name, State.of(module))
    names = {True: list[str](), False: list[str]()}
    for first in own.tensors:
        names[own.is_parameter(first)].append(f"{name}.{first}")
    *before, last = captured.layers

    def moved(flow: TraceFlow) -> TraceFlow:
        trace = replace(flow.trace, state=state)
        return replace(flow, trace=trace, changed=flow.changed.union(names[False]))

    last = replace(
        last,
        parameters=(*last.parameters, *names[True]),
        buffers=(*last.buffers, *names[False]),
        weight_bytes=last.weight_bytes + sum(x.nbytes for x in module.parameters()),
    )
    return replace(
        captured,
        state=state,
        layers=(*before, last),
        training=moved(captured.training),
        evaluation=moved(captured.evaluation),
        trained=_trained(state),
        beside={name: module},
    )


def enough_layers(captured: Captured, num_stages: int) -> Captured:
    """Return the same model, with more layers if there are fewer than stages.

    There are then several per stage, so that stages can be balanced.
    """
    if len(captured.layers) >= num_stages:
        return captured
    return with_more_layers(captured, fewest=_LAYERS_PER_STAGE * num_stages)


def _values(
    flow: TraceFlow, places: Iterable[int], more: Observation, num_samples: int
) -> dict[fx.Node, SentTensor]:
    values = {}
    crossing = (x for place in sorted(places) for x in flow.crossing[place])
    for node in dict.fromkeys(crossing):
        seen, grown = flow.seen(node), more.facts[node].structure
        assert isinstance(grown, TensorInfo)
        growth = tuple(b - a for a, b in zip(seen.shape, grown.shape, strict=True))
        name = f"{flow.trace.path_of(node)}:{node.name}"
        form = seen.dtype, seen.requires_grad, seen.order
        values[node] = SentTensor(name, seen.shape, growth, num_samples, *form)
    return values


def _trained(state: State) -> frozenset[str]:
    return frozenset(name for name, x in state.tensors.items() if x.requires_grad)


def used_in_both(
    training: TraceFlow, evaluation: TraceFlow, starts: Sequence[tuple[int, int]]
) -> list[set[str]]:
    """Return, for each layer, the parameters and buffers that it uses in some mode."""
    here, there = zip(*starts, strict=True)
    used = zip(used_state(training, here), used_state(evaluation, there), strict=True)
    return [a | b for a, b in used]


def _layers(
    training: TraceFlow,
    evaluation: TraceFlow,
    starts: Sequence[tuple[int, int]],
    values: Mapping[fx.Node, SentTensor],
    homes: Sequence[Collection[str]] = (),
) -> tuple[Layer, ...]:
    state = training.trace.state
    here = [start for start, _ in starts]
    homes = homes or with_unused(state, used_in_both(training, evaluation, starts))
    layers = []
    for start, home, (name, modules) in zip(
        here, homes, layer_names(training, here), strict=True
    ):
        names = [x for x in state.tensors if x in home]
        parameters = tuple(x for x in names if state.is_parameter(x))
        layers.append(
            Layer(
                name,
                modules,
                parameters,
                tuple(x for x in names if not state.is_parameter(x)),
                sum(local(state.tensors[x]).nbytes for x in parameters),
                tuple(values[node] for node in training.crossing[start]),
            )
        )
    return tuple(layers)


def _leaf_text(leaf: object) -> str:
    if isinstance(leaf, PerSample):
        return f"{len(leaf)} entries"
    return str(getattr(leaf, "shape", leaf))


def _text(trace: Trace, node: fx.Node) -> str:
    args = fx.node.map_arg((node.args, node.kwargs), lambda x: x.name)
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    inside = trace.objects.get(target, "")
    return f"{node.name} {target} {args} {inside}"


def _target_name(target: Any) -> str:
    return f"{target.__module__}.{getattr(target, '__qualname__', target)}"


def partners(one: TraceFlow, other: TraceFlow) -> dict[fx.Node, fx.Node]:
    """Return, for each call of one trace, the call of another that does the same."""
    a = [_kind(one.trace, node) for node in one.compute]
    b = [_kind(other.trace, node) for node in other.compute]
    if a == b:
        return dict(zip(one.compute, other.compute, strict=True))
    found = {}
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            found[one.compute[block.a + i]] = other.compute[block.b + i]
    return found


def same_places(
    training: TraceFlow, evaluation: TraceFlow, partner_of: Mapping[fx.Node, fx.Node]
) -> dict[int, int]:
    """Return positions at which both can be cut with the same values."""
    place = {node: i for i, node in enumerate(evaluation.compute)}
    found = {}
    for position, node in enumerate(training.compute):
        before = training.compute[position - 1]
        if node in partner_of:
            other = place[partner_of[node]]
        elif before in partner_of:  # the next call is in training only
            other = place[partner_of[before]] + 1
        else:
            continue
        both = training.is_admissible[position] and evaluation.is_admissible[other]
        if both and _same_values(training, position, evaluation, other, partner_of):
            found[position] = other
    return found


def _same_values(
    training: TraceFlow,
    position: int,
    evaluation: TraceFlow,
    other: int,
    partner_of: Mapping[fx.Node, fx.Node],
) -> bool:
    crossing = [partner_of.get(value) for value in training.crossing[position]]
    if set(crossing) != set(evaluation.crossing[other]):
        return False
    pairs = zip(training.crossing[position], crossing, strict=True)
    return all(
        value is not None
        and training.seen(node).shape == evaluation.seen(value).shape
        and training.seen(node).dtype == evaluation.seen(value).dtype
        for node, value in pairs
    )


def _kind(trace: Trace, node: fx.Node) -> tuple[str, str, tuple[str, ...]]:
    """Return a key that is equal for the same call in both traces."""
    return str(node.target), trace.path_of(node), trace.reads(node)
