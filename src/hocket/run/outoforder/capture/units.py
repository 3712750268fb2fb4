"""Groups a step's operators into units: one operator with a weight, and what follows.

    forward     conv  norm  relu │ conv  norm  add  relu │ linear  loss
    unit        0                │ 1                     │ 2

A unit is a stage of the step's program. Operators between the first and the last use of
a weight that is used in three places or more (a loop over time) are one unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from hocket.run.outoforder.capture.lstm import FUSED_LSTM
from hocket.run.outoforder.capture.trace import StepGraph
from hocket.run.stage.compiled.graph.graphs import needed

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
