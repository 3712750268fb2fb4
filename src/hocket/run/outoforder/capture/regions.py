"""Assigns every operator of a step to a region: the F, I or W of a unit.

F holds the operators of the forward that make a loss or a buffer's new value, each in
its own unit. Backward operators follow the gradients that depend on them:

    weight gradients of one unit, and nothing else     W of that unit: only its U waits
    anything else                                      I, of the last unit whose weights
                                                       it reads or whose gradients
                                                       depend on it

An operator that depends on neither (a recomputed activation) is put into the earliest
region that reads it.

A unit is a stage of the program. For each two units that exchange a value, the program
has a flow from the lower to the higher one; `check_order` proves that with these flows
every value is made before it is read, in every order that `hocket.check` accepts.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hocket.core.op import Kind
from hocket.core.program import Net, Program, Stage
from hocket.errors import CaptureError
from hocket.model.trace.observe import is_random
from hocket.run.outoforder.capture.lstm import FUSED_LSTM
from hocket.run.outoforder.capture.trace import StepGraph
from hocket.run.stage.compiled.graph.graphs import needed

# Groups a step's operators into units: one operator with a weight, and what follows.
#
#     forward     conv  norm  relu │ conv  norm  add  relu │ linear  loss
#     unit        0                │ 1                     │ 2
#
# A unit is a stage of the step's program. Operators between the first and the last use
# of a weight that is used in three places or more (a loop over time) are one unit.


_aten = torch.ops.aten
_WITH_WEIGHT: Final = frozenset(
    {
        *(_aten.convolution.default, _aten.mm.default, _aten.addmm.default),
        *(_aten.bmm.default, _aten.baddbmm.default, _aten.linear.default),
        *(_aten.embedding.default, FUSED_LSTM),
    }
)
_FEWEST_USES: Final = 3  # of a loop; tied weights of two layers have two


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a step.

    Args:
        of: the unit of each operator of the forward.
        owner: the unit of each weight that gets a gradient: the first one to use it.
        shared: the weights that heavy operators of several units use.
        weights_read: the weights with a gradient that each operator reads, through
            operators that compute with weights alone (transposes, casts).
        num_units: how many there are.
    """

    of: Mapping[fx.Node, int]
    owner: Mapping[str, int]
    shared: frozenset[str]
    weights_read: Mapping[fx.Node, frozenset[str]]
    num_units: int


def find_units(step: StepGraph) -> Units:
    """Group the operators of a step's forward; see the top of this file."""
    inside = needed([*step.losses.values(), *step.new_buffers.values()])
    forward = [node for node in step.graph.nodes if node in inside]
    reads, only_weights = _weights_read(step)
    computing = [node for node in forward if node not in only_weights]
    places, uses = _places(computing, reads)
    number = _merged(1 + max(places.values()), uses.values())
    of = {node: number[place] for node, place in places.items()}
    for node in reversed(forward):
        if node in only_weights:
            of[node] = min(of[user] for user in node.users if user in of)
    owner: dict[str, int] = {}
    for node in computing:
        for name in reads[node]:
            owner[name] = min(of[node], owner.get(name, of[node]))
    shared = {n for n, used in uses.items() if len({number[i] for i in used}) > 1}
    return Units(of, owner, frozenset(shared), reads, max(number) + 1)


def _places(
    nodes: Sequence[fx.Node], reads: Mapping[fx.Node, frozenset[str]]
) -> tuple[dict[fx.Node, int], dict[str, list[int]]]:
    """Begin a new place at each operator with other weights than the one before.

    Returns:
        The place of each node, and for each weight the places of its operators.
    """
    places: dict[fx.Node, int] = {}
    uses: defaultdict[str, list[int]] = defaultdict(list)
    place, in_place = 0, frozenset[str]()
    for node in nodes:
        own = reads[node]
        if own and node.target in _WITH_WEIGHT:
            if in_place and not own <= in_place:
                place, in_place = place + 1, frozenset()
            in_place |= own
            for name in own:
                uses[name].append(place)
        places[node] = place
    return places, dict(uses)


def _weights_read(
    step: StepGraph,
) -> tuple[dict[fx.Node, frozenset[str]], set[fx.Node]]:
    """Return the weights that each node reads, and the nodes that read nothing else."""
    name_of = {step.parameters[name]: name for name in step.gradients}
    reads: dict[fx.Node, frozenset[str]] = {}
    only_weights: set[fx.Node] = set()
    for node in step.graph.nodes:
        inputs = node.all_input_nodes
        own = [name_of[x] for x in inputs if x in name_of]
        own += [name for x in inputs if x in only_weights for name in reads[x]]
        reads[node] = frozenset(own)
        is_call = node.op == "call_function"
        if is_call and own and all(x in name_of or x in only_weights for x in inputs):
            only_weights.add(node)
    return reads, only_weights


def _merged(num_places: int, uses: Iterable[Sequence[int]]) -> list[int]:
    """Return each place's unit, where all places of a loop are one unit."""
    is_inside = [False] * (num_places + 1)  # joined with the place before
    for places in uses:
        if len(set(places)) >= _FEWEST_USES:
            for place in range(min(places) + 1, max(places) + 1):
                is_inside[place] = True
    numbers, number = [], -1
    for place in range(num_places):
        number += not is_inside[place]
        numbers.append(number)
    return numbers


class RegionKey(NamedTuple):
    """The name of a region: the kind of the op that runs it, and its unit."""

    kind: Kind
    unit: int


RegionOfNode: TypeAlias = Mapping[fx.Node, RegionKey]


@dataclass(frozen=True, slots=True)
class Regions:
    """A step's operators, divided among the ops of a program.

    Args:
        step: the step's graph.
        program: one stage for each unit, on one device, with one microbatch.
        nodes: each region's operators, in the graph's order; a region without operators
            has no entry.
        weights: for each unit, the names of the weights that its U updates.
    """

    step: StepGraph
    program: Program
    nodes: Mapping[RegionKey, tuple[fx.Node, ...]]
    weights: tuple[tuple[str, ...], ...]


def cut_into_regions(step: StepGraph) -> Regions:
    """Cut a step's graph into regions.

    Raises:
        CaptureError: random numbers are drawn in the backward, the backward reads a
            buffer that the forward overwrites, or values cannot be made before they
            are read in every order.
    """
    units = find_units(step)
    places = _Assignment(step, units).places
    nodes: defaultdict[RegionKey, list[fx.Node]] = defaultdict(list)
    for node in step.graph.nodes:
        if node in places:
            nodes[places[node]].append(node)
    weights: list[list[str]] = [[] for _ in range(units.num_units)]
    for name in step.gradients:
        weights[units.owner[name]].append(name)
    linked = _linked_units(step, units, places)
    flows = {(min(pair), max(pair)) for pair in linked if pair[0] != pair[1]}
    program = Program(
        (Net("model", 1),), (Stage("model", 0),) * units.num_units, tuple(sorted(flows))
    )
    by_place = {place: tuple(own) for place, own in nodes.items()}
    regions = Regions(step, program, by_place, tuple(map(tuple, weights)))
    check_order(regions, units)
    return regions


class _Assignment:
    """Finds the region of each operator, in `places`.

    Args:
        step: the step's graph.
        units: the unit of each operator of the forward, and of each weight.
    """

    def __init__(self, step: StepGraph, units: Units) -> None:
        self._step, self._units = step, units
        self._backward = _reached_from(step.start)
        self._reach = self._gradients_reached()
        self.places: dict[fx.Node, RegionKey] = {
            node: RegionKey(Kind.FORWARD, unit) for node, unit in units.of.items()
        }
        for node in step.graph.nodes:
            if node in self._backward:
                self.places[node] = self._backward_place(node)
        wanted = needed(step.gradients.values())
        for node in reversed(step.graph.nodes):
            if node in wanted and node not in self.places:
                users = [self.places[x] for x in node.users if x in self.places]
                read = {units.owner[name] for name in units.weights_read[node]}
                self.places[node] = _first_needed(users, read)
        for node in step.graph.nodes:
            if node in self.places and is_element(node):
                self.places[node] = self.places[node.all_input_nodes[0]]

    def _gradients_reached(self) -> dict[fx.Node, frozenset[str]]:
        names: defaultdict[fx.Node, set[str]] = defaultdict(set)
        for name, node in self._step.gradients.items():
            names[node].add(name)
        reach: dict[fx.Node, frozenset[str]] = {}
        for node in reversed(self._step.graph.nodes):
            if node in self._backward:
                users = (reach[x] for x in node.users if x in reach)
                reach[node] = frozenset(names[node]).union(*users)
        return reach

    def _backward_place(self, node: fx.Node) -> RegionKey:
        owner, read = self._units.owner, self._units.weights_read[node]
        reached = {owner[name] for name in self._reach[node]}
        reading = {owner[name] for name in read}
        if len(reached) == 1 and reading <= reached:
            (unit,) = reached
            early = self._early_unit(node, unit)
            if early is None:
                return RegionKey(Kind.BACKWARD_WEIGHT, unit)
            return RegionKey(Kind.BACKWARD_INPUT, early)
        return RegionKey(Kind.BACKWARD_INPUT, max(reached | reading))

    def _early_unit(self, node: fx.Node, unit: int) -> int | None:
        """Return the unit in whose I a part of a shared weight's gradient is computed.

        A weight that two units use belongs to the first one (tied embeddings: the
        embedding, not the last layer). The last layer's part of the gradient is
        computed with that layer's I: if it were left to the first unit's W, it would
        keep the last layer's activations until then.

        Returns:
            None where the operator belongs into W: it makes no part of a shared
            weight's gradient, or it reads what W has made.
        """
        if not self._reach[node] <= self._units.shared:
            return None
        inputs = [self.places[x] for x in node.all_input_nodes if x in self._backward]
        if any(place.kind is Kind.BACKWARD_WEIGHT for place in inputs):
            return None
        earliest = min(place.unit for place in inputs) if inputs else unit
        return earliest if earliest > unit else None


def is_element(node: fx.Node) -> bool:
    """Return whether a node is `getitem` of an operator with several results."""
    if node.target is not operator.getitem:
        return False
    (source,) = node.all_input_nodes
    return not isinstance(source.meta["val"], Tensor)


def _reached_from(start: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [start]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _first_needed(users: list[RegionKey], read: set[int]) -> RegionKey:
    """Return the region in which an operator is run early enough for all its readers.

    Args:
        users: the readers' regions.
        read: the units whose weights the operator reads. It must run before these are
            updated: W of another unit may come after that, F and I do not.
    """
    place = users[0]
    if len(set(users)) == 1 and (
        place.kind is not Kind.BACKWARD_WEIGHT or read <= {place.unit}
    ):
        return place
    return RegionKey(Kind.BACKWARD_INPUT, max(x.unit for x in users))


def _linked_units(
    step: StepGraph, units: Units, places: RegionOfNode
) -> Iterator[tuple[int, int]]:
    name_of = {node: name for name, node in step.buffers.items()}
    writer = {name: places[node].unit for name, node in step.new_buffers.items()}
    for node, place in places.items():
        for source in node.all_input_nodes:
            if source in places:
                yield places[source].unit, place.unit
            elif (name := name_of.get(source)) in writer:
                _check_reads_early(place, name)
                yield place.unit, writer[name]
        # An update overwrites a weight: all that read it come before.
        for name in units.weights_read[node]:
            yield units.owner[name], place.unit
    for name, node in step.gradients.items():
        yield units.owner[name], places[node].unit
    yield from _random_order(places)


def _check_reads_early(place: RegionKey, name: str | None) -> None:
    if place.kind is not Kind.FORWARD:
        raise CaptureError(
            f"the backward reads the buffer {name!r}, which the forward overwrites: "
            "assign the buffer's new value to it after its last use"
        )


def _random_order(places: RegionOfNode) -> Iterator[tuple[int, int]]:
    """Keep the order in which forwards draw random numbers from one generator."""
    last = None
    for node, place in places.items():
        if isinstance(node.target, OpOverload) and is_random(
            node.target, node.args, node.kwargs
        ):
            if place.kind is not Kind.FORWARD:
                raise CaptureError(
                    f"{node.target} draws random numbers in the backward, whose order "
                    "is not fixed: activation checkpointing around dropout does so"
                )
            if last is not None:
                yield last, place.unit
            last = place.unit


def check_order(regions: Regions, units: Units) -> None:
    """Check that each value is made before it is read, in every order of the program.

    F may read what F of lower units made; I and W what any F, and I of the same or
    higher units made. Nothing but U may read what W made, and no W may read the weights
    of another unit, whose U may have overwritten them.

    Raises:
        CaptureError: an order exists in which a region reads too early or too late.
    """
    place_of = {x: place for place, nodes in regions.nodes.items() for x in nodes}
    for node, place in place_of.items():
        for source in node.all_input_nodes:
            other = place_of.get(source, place)
            if other != place and not _is_before(other, place):
                raise CaptureError(
                    f"{place.kind.value} of unit {place.unit} reads {source}, which "
                    f"{other.kind.value} of unit {other.unit} makes: not every order "
                    "has it made by then"
                )
        others = {units.owner[x] for x in units.weights_read[node]} - {place.unit}
        if others and place.kind is Kind.BACKWARD_WEIGHT:
            raise CaptureError(
                f"W of unit {place.unit} reads weights of units {sorted(others)}, "
                "which these may have updated by then"
            )


def _is_before(maker: RegionKey, reader: RegionKey) -> bool:
    """Return whether a region comes before another in every order with their flow."""
    if maker.kind is Kind.BACKWARD_WEIGHT:
        return False
    if reader.kind is Kind.FORWARD:
        return maker.kind is Kind.FORWARD and maker.unit < reader.unit
    return maker.kind is Kind.FORWARD or maker.unit >= reader.unit
