"""The smallest pieces that a model is cut into, and their names."""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Final

import torch
from torch import fx
from torch._ops import OpOverload

from hocket.model.trace.flow import TraceFlow
from hocket.model.trace.state import State
from hocket.model.trace.value import SentTensor

_MANY_MORE: Final = 2  # times the bytes: a skip adds less, a query as much again
_FEW: Final = 4  # layers begin at one of so many places between weights, or more
_BY_CALL: Final = "@"  # torch.export writes a module's second call as `block@1`


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of calls; the model may be cut before it (unless it is the first).

    Args:
        name: the name of the module that begins here, if one does.
        modules: all modules that begin here, outermost first.
        parameters: the first names of the parameters it uses.
        buffers: the same for buffers.
        weight_bytes: the parameters' bytes; tied ones count in every layer that uses
            them.
        received: the tensors that a stage which begins here receives.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    weight_bytes: int
    received: tuple[SentTensor, ...]


def positions(flow: TraceFlow, places: Mapping[int, int]) -> tuple[int, ...]:
    """Return where each layer begins, position 0 among them.

    Between two calls that use weights there is at most one cut, where the fewest
    tensors cross. Of these, those stay where no more tensors cross than at the next
    ones to the left and right:

        tensors crossing   1        3     4     2       1        2        1
        calls              | query | key | value | dense | linear | linear |
        kept               ^                             ^                 ^

    and between two of them, those where less than twice the bytes cross: inside a
    network with skip connections, but not inside its blocks. Of a network in which
    these are few, since more and more tensors cross, the cheapest others are added.

    Args:
        flow: the training trace's dependencies.
        places: the admissible positions.
    """
    best = _between(flow, places, _weighty(flow) or range(len(flow.compute)))
    counts = [len(flow.crossing[position]) for position in best]
    valleys = [
        i for i, n in enumerate(counts) if n == min(counts[max(i - 1, 0) : i + 2])
    ]
    kept = {0, *(best[i] for i in valleys)}
    for a, b in pairwise((*sorted(kept), len(flow.compute))):
        inside = [position for position in best if a < position < b]
        kept.update(_with_few_bytes(flow, a, b, inside))
    missing = len(best) // _FEW - len(kept)
    kept.update(cheapest_positions(flow, set(best) - kept)[: max(missing, 0)])
    return tuple(sorted(kept))


def cheapest_positions(flow: TraceFlow, places: Iterable[int]) -> list[int]:
    """Return positions sorted by the bytes that cross there, then by their order."""
    return sorted(places, key=lambda place: (_num_bytes(flow, place), place))


def first_positions(flow: TraceFlow) -> dict[str, int]:
    """Return where each module begins."""
    first: dict[str, int] = {}
    for place, node in enumerate(flow.compute):
        for path in flow.trace.modules.get(node, ()):
            first.setdefault(path, place)
    return first


def positions_between_modules(
    flow: TraceFlow, places: Mapping[int, int]
) -> tuple[int, ...]:
    """Return layers that begin between any two modules run as they are.

    Args:
        flow: the training trace's dependencies.
        places: the admissible positions.
    """
    modules = [i for i, x in enumerate(flow.compute) if x.op == "call_module"]
    return (0, *_between(flow, places, modules))


def _between(
    flow: TraceFlow, places: Mapping[int, int], marks: Sequence[int]
) -> list[int]:
    """Return the best position between any two adjacent marks."""
    return [
        min(found, key=lambda position: _cost(flow, position))
        for left, right in pairwise(marks)
        if (found := [i for i in range(left + 1, right + 1) if i in places])
    ]


def _with_few_bytes(
    flow: TraceFlow, a: int, b: int, inside: Sequence[int]
) -> list[int]:
    """Return positions at which little more crosses than at both `a` and `b`."""
    both = set(flow.crossing[a]) & set(flow.crossing[b])
    limit = _MANY_MORE * max(_num_bytes(flow, a, both), _num_bytes(flow, b, both))
    return [position for position in inside if _num_bytes(flow, position, both) < limit]


def layer_names(
    flow: TraceFlow, starts: Sequence[int]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return, for each layer, its name and the modules that begin with it."""
    first = first_positions(flow)
    last = {
        path: place
        for place, node in enumerate(flow.compute)
        for path in flow.trace.modules.get(node, ())
    }
    named = []
    for start, end in pairwise((*starts, len(flow.compute))):
        own = range(start, end)
        # Calls without weights may come before the module that the layer begins with.
        weights = (i for i in own if flow.trace.reads(flow.compute[i]))
        head = next(weights, start)
        modules = tuple(
            path
            for place in (head, *range(start, head))
            for path in flow.trace.modules.get(flow.compute[place], ())
            if first[path] == place
        )
        whole = sorted(
            (x for x in modules if last[x] < end), key=lambda x: x.count(".")
        )
        named.append((_name(flow, flow.compute[start], modules, whole), modules))
    return named


def used_state(flow: TraceFlow, starts: Sequence[int]) -> list[set[str]]:
    """Return, for each layer, the parameters and buffers that it uses."""
    ends = (*starts[1:], len(flow.compute))
    return [
        {x for node in flow.compute[start:end] for x in flow.trace.reads(node)}
        for start, end in zip(starts, ends, strict=True)
    ]


def alike(flow: TraceFlow, starts: Sequence[int]) -> list[int]:
    """Return a number for each layer; layers of the same number do the same work.

    They call the same operators with the same arguments on tensors of the same shapes,
    from parameters of the same shapes. A module that is run as it is, is like no other.
    """
    numbers: dict[Any, int] = {}
    found = []
    for start, end in pairwise((*starts, len(flow.compute))):
        own = flow.compute[start:end]
        place = {node: f"call {i}" for i, node in enumerate(own)}
        calls = tuple(_call_text(flow, node, place) for node in own)
        found.append(numbers.setdefault(calls, len(numbers)))
    return found


def _call_text(flow: TraceFlow, node: fx.Node, place: Mapping[fx.Node, str]) -> str:
    def text(given: fx.Node) -> str:
        if given in place:
            return place[given]
        if flow.trace.is_state(given):
            tensor = flow.trace.state.tensors[str(given.target)]
            return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        return str(flow.facts[given].structure) if given in flow.facts else given.name

    arguments = fx.node.map_arg((node.args, node.kwargs), text)
    return f"{node.target} {arguments} {flow.facts[node].structure}"


def with_unused(state: State, used: Sequence[set[str]]) -> list[set[str]]:
    """Assign unused tensors to the layer with most of their module path."""
    homes = [set(names) for names in used]
    unused = state.tensors.keys() - set().union(*used)
    for name in sorted(unused):
        homes[_nearest(name, used)].add(name)
    return homes


def _nearest(name: str, used: Sequence[set[str]]) -> int:
    shared = [max((_num_shared(name, x) for x in names), default=0) for names in used]
    return shared.index(max(shared))


def _num_shared(a: str, b: str) -> int:
    """Return how many modules two names have in common, from the outermost."""
    pairs = zip(a.split(".")[:-1], b.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _weighty(flow: TraceFlow) -> list[int]:
    """Return the positions of matrix products and table lookups with weights.

    Norms and additions of parameters do not count.
    """
    trace = flow.trace
    of_weights: set[fx.Node] = set()  # views of parameters and the like
    found = []
    for place, node in enumerate(flow.compute):
        inputs = node.all_input_nodes
        if all(trace.is_state(x) or x in of_weights for x in inputs):
            of_weights.add(node)
        matrices = [x for x in trace.reads(node) if trace.state.tensors[x].dim() > 1]
        has_matrix = any(map(trace.state.is_parameter, matrices))
        if (has_matrix or of_weights.intersection(inputs)) and not _is_light(node):
            found.append(place)
    return found


def _is_light(node: fx.Node) -> bool:
    """Return whether a call only rearranges, or does a little for each element."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    is_pointwise = torch.Tag.pointwise in target.tags
    is_joining = target.namespace == "aten" and target._opname in ("cat", "stack")
    return is_pointwise or is_joining or target.is_view


def _cost(flow: TraceFlow, position: int) -> tuple[int, int, int, int]:
    """Return a key: fewest tensors, then outermost border, fewest bytes, the latest."""
    before, after = flow.compute[position - 1 : position + 1]
    return (
        len(flow.crossing[position]),
        _depth(flow, before, after),
        _num_bytes(flow, position),
        -position,
    )


def _num_bytes(flow: TraceFlow, position: int, but: Container[fx.Node] = ()) -> int:
    values = (flow.seen(node) for node in flow.crossing[position] if node not in but)
    return sum(math.prod(value.shape) * value.dtype.itemsize for value in values)


def _depth(flow: TraceFlow, a: fx.Node, b: fx.Node) -> int:
    """Return how many modules both calls are inside of."""
    left, right = flow.trace.modules.get(a, ()), flow.trace.modules.get(b, ())
    return len(set(left) & set(right))


def _name(
    flow: TraceFlow, node: fx.Node, modules: tuple[str, ...], whole: Sequence[str]
) -> str:
    """Choose a layer's name: a list's block, else a whole module, else what begins."""
    last = {x: x.rpartition(".")[2].partition(_BY_CALL)[0] for x in modules}
    numbered = [path for path in modules if last[path].isdigit()]
    for names in (numbered, whole, modules[-1:]):
        if names:
            return names[0]
    return ".".join(filter(None, (flow.trace.path_of(node), node.name)))
